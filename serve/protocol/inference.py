"""ModelInfer: takes a request's bytes to the queue, and turns the outputs into a response's bytes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from halfserve.protos.inference_pb2 import ModelInferRequest
from halfserve.serve.engine.errors import (
    BackendError,
    InferenceError,
    InvalidArgumentError,
    OutOfMemoryError,
    is_out_of_memory,
)
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.model import Model, Scheduler
from halfserve.serve.engine.requests import Answer, InferRequest, Parameter, RawInputs, RawLayout
from halfserve.serve.engine.tensors import Tensors
from halfserve.serve.observability.observability import Observer
from halfserve.serve.observability.observed_request import Caller, ObservedRequest
from halfserve.serve.protocol.codec import (
    EMPTY_FINAL,
    decode_inputs,
    input_slices,
    parameters_of_request,
    priority_of,
    queue_timeout_s,
    raw_layout,
    requested_names,
    special_outputs,
)
from halfserve.serve.protocol.deferred_response import DeferredResponse
from halfserve.serve.protocol.messages import check_fields, parse, parse_request, split_request
from halfserve.serve.protocol.request_cache import CachedRequest, RequestCache
from halfserve.serve.protocol.shared_memory import RegionUse, SharedMemory

logger = logging.getLogger(__name__)

Reply = Callable[[bytes | InferenceError], None]
Cancel = Callable[[], None]


class Watch(Protocol):
    """An observer of one request."""

    def taken(self, model: Model, request_id: bytes, request: InferRequest) -> None:
        """The request is valid and about to be queued."""


class ManyReplies(Protocol):
    """A client that takes any number of responses to one request."""

    def begin(self, *, wants_empty_final: bool) -> None:
        """The request is for a decoupled model. `wants_empty_final`: the client wants a last response without outputs."""

    def response(self, response: bytes | InferenceError, *, final: bool, read: Callable[[], None]) -> None:
        """Take one response. At the end the request's `Reply` gets one without outputs, or the error.

        `read` is to be called on the event loop once the client can take more: a model that is faster than its client waits.
        """


class OutcomeListener(Protocol):
    """Records requests without a response."""

    def failed(self, data: bytes, error: Exception) -> None: ...  # a request has ended with an error
    def gone(self, data: bytes) -> None: ...  # the client of a request has disconnected


class InferenceEntry(Protocol):
    """Takes serialized requests."""

    def infer(
        self, data: bytes | memoryview, time_left_s: float | None, reply: Reply, *, many: ManyReplies | None = None
    ) -> Cancel:
        """See `Inference.infer`."""
        ...


class AnyInference(InferenceEntry, OutcomeListener, Protocol):
    """The entry for requests as transports see it: `Inference`, or a wrapper of it."""


class WatchableInference(AnyInference, Protocol):
    """An entry that reports each request before it is queued."""

    def infer(
        self,
        data: bytes | memoryview,
        time_left_s: float | None,
        reply: Reply,
        watch: Watch | None = None,
        *,
        many: ManyReplies | None = None,
    ) -> Cancel:
        """See `Inference.infer`."""
        ...


class Inference:
    """Checks requests, queues them and serializes their responses. Repeated requests are parsed once (see `request_cache`)."""

    def __init__(
        self,
        core: InferenceCore,
        memory: SharedMemory,
        cache: RequestCache | None = None,
        client: Callable[[], str] | None = None,
    ) -> None:
        self._client = client
        self._core = core
        self._memory = memory
        if cache is None:
            cache = RequestCache()
            core.on_change(cache.forget)
        self._cache = cache

    def for_client(self, client: Callable[[], str]) -> Inference:
        """Return an entry for the requests of one client, which `client` names, so that clients share threads fairly."""
        return Inference(self._core, self._memory, self._cache, client)

    def infer(
        self,
        data: bytes | memoryview,
        time_left_s: float | None,
        reply: Reply,
        watch: Watch | None = None,
        *,
        many: ManyReplies | None = None,
    ) -> Cancel:
        """Check a request and queue it; `reply` is called once, later, on the event loop.

        Args:
            data: a serialized ModelInferRequest; a view must not change any more.
            time_left_s: seconds until the client's deadline; None without one.
            reply: gets the serialized ModelInferResponse, or the error.
            watch: is called before the request is queued.
            many: takes the responses of a decoupled model; None for a client that takes a single response.

        Returns:
            A function that cancels the request.

        Raises:
            InferenceError: the request is wrong or refused; `reply` is not called.
        """
        pattern = self._cache.match(data)
        try:
            request_id = b""
            if pattern is not None and pattern.id_end > pattern.id_start:
                request_id = bytes(data[pattern.id_start : pattern.id_end])
            if pattern is not None and (not request_id or request_id.isascii()):
                cached = pattern.cached
                inputs = self._raw_inputs(cached, pattern.layout, data, pattern.offsets)
                parameters = cached.parameters
                if pattern.sequence_end:
                    parameters = cached.with_sequence(bytes(data[pattern.sequence_start : pattern.sequence_end]))
            else:
                cached, request_id, inputs, parameters = self._understand(bytes(data))
        except InferenceError as error:
            self._core.figures.refuse(error)
            raise
        turn = cached.turn
        use: RegionUse | None = None
        if cached.slices:
            use = RegionUse(self._memory, cached.slices)
            reply = _Releasing(use, reply)
        answering = _Answering(self, cached, request_id, self._memory.latest, reply)
        queued = InferRequest(
            inputs,
            cached.outputs,
            cached.rows,
            cached.bucket,
            None if time_left_s is None else _deadline(time_left_s),
            answering,
            turn.level,
            None if turn.delay_after_s is None else _deadline(turn.delay_after_s),
            None if turn.drop_after_s is None else _deadline(turn.drop_after_s),
            len(data) + cached.shared_bytes,
            None,
            request_id,
            parameters,
        )
        if many is not None and cached.model.is_decoupled:
            many.begin(wants_empty_final=bool(cached.parameters.get(EMPTY_FINAL)))
            queued.respond = _Responding(self, cached, request_id, many)
        if watch is not None:
            watch.taken(cached.model, request_id, queued)
        self._core.submit(cached.model, queued)
        return _Cancellation(cached.model.scheduler, queued, answering, use)

    def failed(self, data: bytes, error: Exception) -> None:
        """Do nothing: only observed inference records failures."""

    def gone(self, data: bytes) -> None:
        """Do nothing: only observed inference records cancellations."""

    def _understand(self, data: bytes) -> tuple[CachedRequest, bytes, Tensors, Mapping[str, Parameter]]:
        check_fields(data)
        cut = split_request(data)
        cached = self._cache.find(cut)
        offsets = None if cached is None or cut is None else cached.offsets(cut.raw)
        if cached is not None and cached.layout is not None and cut is not None and offsets is not None:
            self._cache.keep_pattern(data, cut, cached)
            start, size = cut.sequence
            parameters = cached.with_sequence(data[start : start + size]) if size else cached.parameters
            return cached, cut.id, self._raw_inputs(cached, cached.layout, data, offsets), parameters
        request = parse(ModelInferRequest, data)
        cached, decoded = self._checked(request, data)
        self._cache.keep(cut, cached)
        return cached, request.id.encode(), decoded, cached.parameters

    def _raw_inputs(
        self, cached: CachedRequest, layout: RawLayout, data: bytes | memoryview, offsets: tuple[int, ...]
    ) -> Tensors:
        if not cached.slices:
            return RawInputs(layout, data, offsets)
        binding = cached.binding
        if not binding.is_bound:
            self._memory.bind(binding, cached.slices, layout.inputs, cached.input_slices)
        return RawInputs(layout, data, offsets, binding.outside)

    def _checked(self, request: ModelInferRequest, data: bytes) -> tuple[CachedRequest, Tensors]:
        model = self._core.model(request.model_name, request.model_version)
        decoded = decode_inputs(request, model, self._memory, data, self._client)
        outputs = requested_names(request, model)
        special = special_outputs(request, model, self._memory)
        of_inputs = input_slices(request)
        places = [place for place in (*of_inputs, *(wanted.place for wanted in special.values())) if place is not None]
        cached = CachedRequest(
            model=model,
            layout=raw_layout(request, model),
            outputs=outputs,
            rows=decoded.rows,
            bucket=decoded.bucket,
            turn=model.queue_policy.turn(priority_of(request), queue_timeout_s(request)),
            parameters=parameters_of_request(request),
            input_slices=tuple(of_inputs) if any(of_inputs) else None,
            slices=tuple(places),
            special=special,
        )
        return cached, decoded.inputs

    def deferred(self, write: Callable[[Tensors | InferenceError], bytes | InferenceError], reply: Reply) -> DeferredResponse:
        """Return a response that `write` serializes, on a thread if it is large."""
        return DeferredResponse(write, reply, self._core.wait_for)

    def response(
        self, cached: CachedRequest, request_id: bytes, since: int, result: Tensors | InferenceError
    ) -> bytes | InferenceError:
        """Return the serialized response, or the error."""
        if isinstance(result, InferenceError):
            return result
        try:
            return cached.responses.response(request_id, result, self._memory, since)
        except InferenceError as error:
            return error
        except Exception as error:
            name = cached.model.name
            if is_out_of_memory(error):  # as large requests can make it
                said = "the answer of %s cannot be written: memory ran out"
                logger.error(said, name, extra={"model": name})  # noqa: TRY400  (the cause is known)
                return OutOfMemoryError()
            logger.exception("the answer of %s does not fit its interface", name, extra={"model": name})
            return BackendError(f"model {name!r} answered what its interface does not declare: {type(error).__name__}")


class _Answering:
    """Serializes the response once the outputs are there, on a thread if that takes long.

    A class, because making one is faster than `functools.partial`.
    """

    __slots__ = ("_cached", "_deferred", "_inference", "_reply", "_request_id", "_since")

    def __init__(self, inference: Inference, cached: CachedRequest, request_id: bytes, since: int, reply: Reply) -> None:
        """`since`: see `SharedMemory.check`."""
        self._inference = inference
        self._cached = cached
        self._request_id = request_id
        self._since = since
        self._reply = reply
        self._deferred: DeferredResponse | None = None

    def __call__(self, result: Tensors | InferenceError) -> None:
        if type(result) is not Answer or result.batch.is_large or self._cached.takes_long:
            deferred = self._deferred = self._inference.deferred(self._written, self._end)
            deferred.done(result)
        else:
            self._reply(self._written(result))

    def gone(self) -> None:
        """Drop the response."""
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            deferred.gone()

    def _end(self, response: bytes | InferenceError) -> None:
        self._deferred = None  # breaks a reference cycle
        self._reply(response)

    def _written(self, result: Tensors | InferenceError) -> bytes | InferenceError:
        return self._inference.response(self._cached, self._request_id, self._since, result)


class _Responding:
    """Serializes each response of a decoupled model."""

    __slots__ = ("_cached", "_inference", "_many", "_request_id")

    def __init__(self, inference: Inference, cached: CachedRequest, request_id: bytes, many: ManyReplies) -> None:
        self._inference = inference
        self._cached = cached
        self._request_id = request_id
        self._many = many

    def __call__(self, result: Tensors | InferenceError, final: bool, read: Callable[[], None]) -> None:
        self._many.response(self._inference.response(self._cached, self._request_id, 0, result), final=final, read=read)


class _Releasing:
    """Allows the regions of a request to be unregistered once it is answered."""

    __slots__ = ("_reply", "_use")

    def __init__(self, use: RegionUse, reply: Reply) -> None:
        self._use = use
        self._reply = reply

    def __call__(self, response: bytes | InferenceError) -> None:
        self._use.end()
        self._reply(response)


class _Cancellation:
    """Frees a request's place in the queue, drops its response, and allows its regions to be unregistered.

    Made once the request is queued; from then on its regions are in use.
    """

    __slots__ = ("_answering", "_request", "_scheduler", "_use")

    def __init__(self, scheduler: Scheduler, request: InferRequest, answering: _Answering, use: RegionUse | None) -> None:
        self._scheduler = scheduler
        self._request = request
        self._answering = answering
        self._use = use
        if use is not None:
            use.begin()

    def __call__(self) -> None:
        self._answering.gone()
        if self._use is not None:
            self._use.end()
        self._scheduler.cancel(self._request)


def _deadline(seconds: float) -> float:
    """Return the time in `seconds` from now, on time.monotonic()'s clock."""
    return time.monotonic() + seconds


class ObservedInference:
    """Entry for the calls with one list of headers on one connection: counts requests and selects those to observe."""

    __slots__ = ("_caller", "_inference", "_observer", "has_parent")

    def __init__(
        self,
        inference: WatchableInference,
        observer: Observer,
        peer: str,
        headers: Mapping[bytes, bytes],
        token: str = "",
        *,
        is_rest: bool = False,
    ) -> None:
        """`headers`: of the calls, with names in lower case; `token`: the name of the token's holder; `is_rest`: whether the
        calls came over REST.
        """
        self._inference = inference
        self._observer = observer
        self._caller = Caller(peer, headers, token, is_rest=is_rest)
        self.has_parent = self._caller.parent is not None  # whether the client sent a trace context

    def infer(
        self, data: bytes | memoryview, time_left_s: float | None, reply: Reply, *, many: ManyReplies | None = None
    ) -> Cancel:
        observer = self._observer
        observer.until -= 1
        if observer.until and (observer.tracer is None or not self.has_parent):
            return self._inference.infer(data, time_left_s, reply, many=many)
        return self.chosen().infer(data, time_left_s, reply, many=many)

    def chosen(self) -> ChosenInference:
        """The entry for one counted request that may be observed."""
        chosen = ChosenInference(self._inference, self._observer, self._caller)
        self._observer.choose(chosen)
        return chosen

    def failed(self, data: bytes, error: Exception) -> None:
        self._observer.failed(self._caller, _asked(data), len(data), error)

    def gone(self, data: bytes) -> None:
        self._observer.failed(self._caller, _asked(data), len(data), None)


class ChosenInference(ObservedRequest):
    """Entry for one observed request."""

    __slots__ = ("_inference",)

    def __init__(self, inference: WatchableInference, observer: Observer, caller: Caller) -> None:
        super().__init__(observer, caller)
        self._inference = inference

    def infer(
        self, data: bytes | memoryview, time_left_s: float | None, reply: Reply, *, many: ManyReplies | None = None
    ) -> Cancel:
        self.expect(len(data), reply)
        try:
            self.cancel = self._inference.infer(data, time_left_s, self.answered, self, many=many)
        except Exception as error:
            self.refused(error)
            raise
        return self.gone


def _asked(data: bytes) -> tuple[str, str, str]:
    """Return the model, version and id of a request, as far as they can be read."""
    try:
        request = parse_request(data)
    except InvalidArgumentError:
        return "", "", ""
    return request.model_name, request.model_version, request.id
