"""One inference: the metadata where it is missing, the request, and what may be tried again."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

from protos import inference_pb2 as pb
from serve.client.checks import check_named
from serve.client.errors import AccessDenied, InvalidRequest, ModelNotFound, Unsupported
from serve.client.exchanges.calls import Call, Exchange
from serve.client.exchanges.inquiries import model_config, model_metadata
from serve.client.exchanges.messages import check_answer, infer_request, output_arrays
from serve.client.sharing.shared_exchange import SharingRefused, ask_sharing, settle
from serve.client.sharing.shared_region import SharedRegion
from serve.client.sharing.shared_tensors import SharedTensors, SlabPool
from serve.client.values.answer import InferAnswer, answer_of
from serve.client.values.parameters import is_stateful
from serve.client.values.tensors import Array

MetadataCache = dict[tuple[str, str], pb.ModelMetadataResponse]


class InferState:
    """What a client remembers from one inference to the next.

    Attributes:
        metadata: (model, version) -> its metadata.
        batching: (model, version) -> whether an output of the model has as many rows as its inputs.
        regions: shared memory that the caller has open.
        left: names of regions that are gone here, and that the server may still know.
        pool: shared memory for large tensors; None where the client does not use it on its own.
    """

    def __init__(self, *, shared_memory: bool = False) -> None:
        self.metadata: MetadataCache = {}
        self.batching: dict[tuple[str, str], bool] = {}
        self.regions: tuple[SharedRegion, ...] = ()
        self.left: tuple[str, ...] = ()
        self.pool = SlabPool() if shared_memory else None
        self._lock = threading.Lock()

    def add_region(self, region: SharedRegion) -> None:
        """The caller has opened a region."""
        with self._lock:
            self.regions = (*self.regions, region)

    def remove_region(self, region: SharedRegion) -> None:
        """The caller has closed a region."""
        with self._lock:
            self.regions = tuple(one for one in self.regions if one is not region)

    def leave(self, *names: str) -> None:
        """Regions that nobody has heard the server forget."""
        with self._lock:
            self.left = (*self.left, *names)

    def take_left(self) -> tuple[str, ...]:
        """The names that are to be unregistered; they are the caller's from now on."""
        with self._lock:
            names, self.left = self.left, ()
        return names

    def sharing(self) -> SharedTensors | None:
        """For the tensors of one request; None where nothing can lie in shared memory."""
        pool = self.pool if self.pool is not None and self.pool.is_on else None
        return SharedTensors(self.regions, pool) if self.regions or pool is not None else None


def infer_message(request: pb.ModelInferRequest) -> Exchange[pb.ModelInferResponse]:
    """A request that the caller has built, and the response as it came."""
    answer: pb.ModelInferResponse = yield infer_call(request, idempotent=True)
    return answer


def infer_call(request: pb.ModelInferRequest, *, idempotent: bool) -> Call:
    """The call for a request; one that belongs to a sequence never counts as idempotent."""
    return Call(
        method="ModelInfer",
        request=request,
        answer=pb.ModelInferResponse,
        idempotent=idempotent and not is_stateful(request),
    )


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
    """Ask for the metadata once per model, then for the inference.

    A model can be replaced while the client lives, so metadata from the cache never has the last word: a request that does not
    fit it is judged again by fresh metadata, and one that the server refuses makes the client forget it.

    Args:
        state: the client's.
        model: its name.
        inputs: name -> array.
        version: empty for the one that the model's policy chooses.
        into: arrays in shared memory for outputs, by name.
        idempotent: whether the request may be made twice.
        options: those of `serve.client.exchanges.messages.infer_request`.
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
    """What this client has found wrong before it sent anything."""

    def __init__(self, error: InvalidRequest) -> None:
        super().__init__(str(error))
        self.error = error


def fresh_metadata(state: InferState, key: tuple[str, str]) -> Exchange[pb.ModelMetadataResponse]:
    """Ask for a model's metadata, and remember it."""
    metadata = yield from model_metadata(*key)
    remember(state, key, metadata)
    return metadata


def remember(state: InferState, key: tuple[str, str], metadata: pb.ModelMetadataResponse) -> None:
    """Keep a model's metadata under the name that was asked for: requests go to it, whatever the server calls the model."""
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
            request = infer_request(metadata, inputs, **options)
        except InvalidRequest as error:
            raise _DoesNotFit(error) from None
        response: pb.ModelInferResponse = yield infer_call(request, idempotent=idempotent)
        check(response)
        return answer_of(response, output_arrays(response))
    sharing = sharing or SharedTensors((), None)
    batching = yield from _batching(state, metadata, options["version"])
    failure: BaseException | None = None
    try:
        request = _sharing_request(sharing, metadata, inputs, into, options, batching=batching)
        return (yield from ask_sharing(state.pool, sharing, infer_call(request, idempotent=idempotent), check))
    except BaseException as error:
        failure = error
        if not isinstance(error, SharingRefused):
            raise
    finally:
        settle(state.pool, sharing, failure)
    # The pool is off from now on.
    return (yield from _attempt(state, metadata, inputs, into, options, idempotent=idempotent))


def _batching(state: InferState, metadata: pb.ModelMetadataResponse, version: str) -> Exchange[bool]:
    """Whether rows that come in come out: metadata has the same -1 for a batch as for any other size."""
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
) -> pb.ModelInferRequest:
    try:
        sharing.place_outputs(metadata, into)
        if not options.get("top_k"):
            sharing.reserve_outputs(metadata, inputs, options.get("outputs"), batching=batching)
        return infer_request(metadata, inputs, find_place=sharing.find_place, into=sharing.into, **options)
    except InvalidRequest as error:
        raise _DoesNotFit(error) from None
