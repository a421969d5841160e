"""One inference as an exchange: options, metadata cache, request, shared memory and retries."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypedDict

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.client.array_conversion import Array
from halfserve.serve.client.channel_settings import Compression, HeaderValue
from halfserve.serve.client.errors import AccessDenied, ClientError, InvalidRequest, ModelNotFound, Repeat, Unsupported
from halfserve.serve.client.exchange import Exchange, UnaryRpc
from halfserve.serve.client.infer_messages import (
    InferAnswer,
    InferResponse,
    LargeResponse,
    Parameter,
    Raw,
    answer_of,
    check_answer,
    check_named,
    is_stateful,
    output_arrays,
    request_parts,
    serialized_request,
)
from halfserve.serve.client.management import model_config, model_metadata, register_region, unregister_region
from halfserve.serve.client.shared_regions import SharedRegion
from halfserve.serve.client.shared_tensors import (
    MAY_STILL_RUN,
    SharedTensors,
    SharingRefused,
    SlabPool,
    ask_sharing,
    settle,
    unregister,
)

ModelKey = tuple[str, str]  # name and version; the version is empty for the server's choice


class SendOptions(TypedDict, total=False):
    """Options for sending a call.

    Attributes:
        timeout_s: time limit of the whole call in seconds, retries included; None (the default) for the client's own.
        compression: compression of the request, "gzip" or "deflate"; None (the default) for the client's own.
        metadata: gRPC metadata for this call, beside the client's own.
    """

    timeout_s: float | None
    compression: Compression | None
    metadata: Mapping[str, HeaderValue] | None


SEND_OPTIONS = frozenset(SendOptions.__annotations__)


class RequestOptions(TypedDict, total=False):
    """Options of an inference request.

    Attributes:
        outputs: names of the outputs to return; None (the default) for all.
        request_id: id returned in the response and written to the server's log.
        parameters: request parameters that the model defines, such as {"temperature": 0.5}.
        priority: 1 is the most urgent; 0 (the default) is the model's default level.
        queue_timeout_s: longest time in the server's queue in seconds, where the model allows requests to set it.
        top_k: number of best classes to name instead of returning all values, for all outputs or by output name. Such
            an output comes as BYTES "value:index[:label]"; `halfserve.serve.client.classes_of` reads it.
        cast: convert arrays of another dtype to the model's, such as float32 to FP16; a value that would overflow is an error.
    """

    outputs: Sequence[str] | None
    request_id: str
    parameters: Mapping[str, Parameter] | None
    priority: int
    queue_timeout_s: float | None
    top_k: int | Mapping[str, int] | None
    cast: bool


class BoundInferOptions(RequestOptions, SendOptions, total=False):
    """Options of `infer` of a model handle, besides the inputs.

    Attributes:
        into: output name -> an array from `shared_region` of the output's dtype; the server writes the output there instead of
            sending it.
        idempotent: whether computing the request twice does no harm (the default: a model is a function of its inputs). Pass
            False for models that keep state between requests; requests with a "sequence_id" never count as idempotent.
    """

    into: Mapping[str, Array] | None
    idempotent: bool


class InferOptions(BoundInferOptions, total=False):
    """Options of `infer` of a client, besides the model and its inputs.

    Attributes:
        version: version of the model; empty (the default) for the one that the model's policy chooses.
    """

    version: str


def without_sending(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in SEND_OPTIONS}


class InferState:
    """State that a client keeps between inferences."""

    def __init__(self, *, shared_memory: bool = False) -> None:
        self.metadata: dict[ModelKey, pb.ModelMetadataResponse] = {}  # metadata of each model that was used
        self.batching: dict[ModelKey, bool] = {}  # whether the outputs have as many rows as the inputs, by model
        self.regions: tuple[SharedRegion, ...] = ()  # shared memory regions that the caller has open
        self.left: tuple[str, ...] = ()  # names of closed regions that may still be registered at the server
        # Shared memory for large tensors; None if the client does not use shared memory by itself.
        self.pool = SlabPool() if shared_memory else None
        self._lock = threading.Lock()

    def add_region(self, region: SharedRegion) -> None:
        with self._lock:
            self.regions = (*self.regions, region)

    def remove_region(self, region: SharedRegion) -> None:
        with self._lock:
            self.regions = tuple(one for one in self.regions if one is not region)

    def leave(self, *names: str) -> None:
        """Record regions whose unregistration the server has not confirmed."""
        with self._lock:
            self.left = (*self.left, *names)

    def take_left(self) -> tuple[str, ...]:
        """Return the names to unregister, and forget them."""
        with self._lock:
            names, self.left = self.left, ()
        return names

    def sharing(self) -> SharedTensors | None:
        """Make the shared-memory placement for one request; None where no tensor can be in shared memory."""
        pool = self.pool if self.pool is not None and self.pool.is_on else None
        return SharedTensors(self.regions, pool) if self.regions or pool is not None else None


def infer_message(request: pb.ModelInferRequest) -> Exchange[pb.ModelInferResponse]:
    answer: InferResponse = yield UnaryRpc(request, idempotent=not is_stateful(request))
    return pb.ModelInferResponse.FromString(answer.data) if isinstance(answer, LargeResponse) else answer


def _infer_call(parts: tuple[pb.ModelInferRequest, list[Raw]], *, idempotent: bool) -> UnaryRpc:
    """Return the RPC for a request; one that belongs to a sequence never counts as idempotent.

    It is serialized now: the caller may change its arrays before the request is sent, or sent again.
    """
    request, raw = parts
    return UnaryRpc(request, idempotent and not is_stateful(request), serialized_request(request, raw))


def infer(
    state: InferState,
    model: str,
    inputs: Mapping[str, Any],
    *,
    version: str = "",
    into: Mapping[str, Array] | None = None,
    idempotent: bool = True,
    **options: Any,
) -> Exchange[InferAnswer]:
    """Read the metadata once per model, then run the inference; `options` are those of `request_parts`.

    A model can be replaced while the client lives, so cached metadata alone never decides: a request that does not fit it is
    checked against fresh metadata, and a request that the server refuses clears the cache.
    """
    check_named(inputs)
    key = (model, version)
    cached = state.metadata.get(key)
    options |= {"version": version}
    metadata = cached or (yield from fresh_metadata(state, key))
    try:
        return (yield from _attempt(state, metadata, inputs, into or {}, options, idempotent=idempotent))
    except _DoesNotFit as misfit:
        if cached is None:
            raise misfit.error from None
    except (InvalidRequest, ModelNotFound):
        state.metadata.pop(key, None)
        state.batching.pop(key, None)
        raise
    metadata = yield from fresh_metadata(state, key)
    try:
        return (yield from _attempt(state, metadata, inputs, into or {}, options, idempotent=idempotent))
    except _DoesNotFit as misfit:
        raise misfit.error from None


class _DoesNotFit(Exception):  # noqa: N818  (never leaves this file)
    """An error that this client found before it sent the request."""

    def __init__(self, error: InvalidRequest) -> None:
        super().__init__(str(error))
        self.error = error


def fresh_metadata(state: InferState, key: ModelKey) -> Exchange[pb.ModelMetadataResponse]:
    metadata = yield from model_metadata(*key)
    remember(state, key, metadata)
    return metadata


def remember(state: InferState, key: ModelKey, metadata: pb.ModelMetadataResponse) -> None:
    """Cache a model's metadata under the requested name, which requests must carry even if the server answers with another."""
    metadata.name = key[0]
    state.metadata[key] = metadata


def _attempt(
    state: InferState,
    metadata: pb.ModelMetadataResponse,
    inputs: Mapping[str, Any],
    into: Mapping[str, Array],
    options: Mapping[str, Any],
    *,
    idempotent: bool,
) -> Exchange[InferAnswer]:
    check = partial(check_answer, wanted=(*(options.get("outputs") or ()), *into), request_id=options.get("request_id", ""))
    sharing = state.sharing()
    if sharing is None and not into:
        try:
            parts = request_parts(metadata, inputs, **options)
        except InvalidRequest as error:
            raise _DoesNotFit(error) from None
        response: InferResponse = yield _infer_call(parts, idempotent=idempotent)
        check(response)
        return answer_of(response, output_arrays(response))
    sharing = sharing or SharedTensors((), None)
    batching = yield from _batching(state, metadata, options["version"])
    failure: BaseException | None = None
    try:
        parts = _sharing_request(sharing, metadata, inputs, into, options, batching=batching)
        return (yield from ask_sharing(state.pool, sharing, _infer_call(parts, idempotent=idempotent), check))
    except BaseException as error:
        failure = error
        if not isinstance(error, SharingRefused):
            raise
    finally:
        settle(state.pool, sharing, failure)
    # The pool is off from now on.
    return (yield from _attempt(state, metadata, inputs, into, options, idempotent=idempotent))


def _batching(state: InferState, metadata: pb.ModelMetadataResponse, version: str) -> Exchange[bool]:
    """Return whether outputs have as many rows as inputs; metadata has -1 both for a batch and for any other variable size."""
    key, depends = (metadata.name, version), any(tensor.shape[:1] == [-1] for tensor in metadata.outputs)
    if not depends or state.pool is None or not state.pool.is_on:
        return False
    if key not in state.batching:
        try:
            config = yield from model_config(*key)
            state.batching[key] = config.max_batch_size > 0
        except (Unsupported, AccessDenied):
            state.batching[key] = False
    return state.batching[key]


def _sharing_request(
    sharing: SharedTensors,
    metadata: pb.ModelMetadataResponse,
    inputs: Mapping[str, Any],
    into: Mapping[str, Array],
    options: Mapping[str, Any],
    *,
    batching: bool,
) -> tuple[pb.ModelInferRequest, list[Raw]]:
    try:
        sharing.place_outputs(metadata, into)
        if not options.get("top_k"):
            sharing.reserve_outputs(metadata, inputs, options.get("outputs"), batching=batching)
        return request_parts(metadata, inputs, find_place=sharing.find_place, into=sharing.into, **options)
    except InvalidRequest as error:
        raise _DoesNotFit(error) from None


def open_region(state: InferState, byte_size: int) -> Exchange[SharedRegion]:
    """Create a region and register it; if the server refuses it, its name is removed again."""
    yield from _unregister_left(state)
    region = SharedRegion(byte_size)
    try:
        yield from register_region(region.name, region.key, region.byte_size)
    except BaseException as error:
        region.unlink()
        if _may_be_registered(error):
            state.leave(region.name)
        raise
    state.add_region(region)
    return region


def close_region(state: InferState, region: SharedRegion) -> Exchange[None]:
    """Unregister a region and remove its name, whether the server answers or not."""
    state.remove_region(region)
    region.unlink()
    state.leave(region.name)
    yield from _unregister_left(state)


def unregister_everything(state: InferState) -> Exchange[None]:
    """Unregister all memory of this client that the server may have registered, while the server answers."""
    if state.pool is not None:
        yield from unregister(state.pool, state.pool.take_all())
    state.leave(*(region.name for region in state.regions))  # the caller's `with` blocks may end after the client is closed
    yield from _unregister_left(state)


def _unregister_left(state: InferState) -> Exchange[None]:
    """Unregister closed regions, which the server keeps mapped until then; a cancelled attempt leaves the rest to the next."""
    names = state.take_left()
    try:
        while names:
            yield from unregister_region(names[0])
            names = names[1:]
    except ClientError:
        return  # the server releases its regions when it stops
    except BaseException:
        state.leave(*names)
        raise


def _may_be_registered(error: BaseException) -> bool:
    if not isinstance(error, ClientError):
        return True  # the caller was cancelled or interrupted
    return error.code in MAY_STILL_RUN and error.repeat is not Repeat.SAFE
