"""ModelInfer: takes a request's bytes to the queue, and turns the outputs into a response's bytes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from halfserve.protos.inference_pb2 import ModelInferRequest
from halfserve.protos.request_parameters import CAPTURE, EMPTY_FINAL
from halfserve.serve.engine.errors import (
    BackendError,
    InferenceError,
    InvalidArgumentError,
    NotFoundError,
    OutOfMemoryError,
    UnavailableError,
    is_out_of_memory,
)
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.requests import Answer, InferRequest, Parameter
from halfserve.serve.engine.tensors import RawInputs, RawLayout, Tensors
from halfserve.serve.observability.inference_record import Caller, InferenceRecord
from halfserve.serve.observability.observer import Observer
from halfserve.serve.protocol.codec import (
    decode_inputs,
    input_slices,
    parameters_of_request,
    priority_of,
    queue_timeout_s,
    raw_layout,
    requested_names,
    special_outputs,
    wants_timings,
)
from halfserve.serve.protocol.large_bytes import DeferredResponse, join_unlocked
from halfserve.serve.protocol.messages import check_fields, parse, parse_request, split_request
from halfserve.serve.protocol.request_cache import CachedRequest, RequestCache
from halfserve.serve.protocol.shared_memory import RegionUse, SharedMemory
from halfserve.serve.protocol.timings import timing_parameters

logger = logging.getLogger(__name__)

Reply = Callable[[bytes | InferenceError], None]
Cancel = Callable[[], None]


class ManyReplies(Protocol):
    """A client that takes any number of responses to one request."""

    def begin(self, *, wants_empty_final: bool) -> None:
        """Take note that the request is for a decoupled model. `wants_empty_final`: the client wants a last response without
        outputs.
        """

    def response(self, response: bytes | InferenceError, *, final: bool, read: Callable[[], None]) -> None:
        """Take one response. At the end the request's `Reply` gets one without outputs, or the error.

        `read` is to be called on the event loop once the client can take more: a model that is faster than its client waits.
        """


# Most bytes in shared memory of a captured request: the event loop copies them in a millisecond.
MAX_COPIED_BYTES: Final = 1 << 22
NO_CALLER: Final = Caller("", {})


class InferenceEntry(Protocol):
    """The entry for the requests of one caller as transports see it: `Inference`, or a wrapper of it."""

    def infer(
        self, data: bytes | memoryview, time_left_s: float | None, reply: Reply, *, many: ManyReplies | None = None
    ) -> Cancel:
        """See `Inference.infer`."""
        ...

    def failed(self, data: bytes, error: Exception) -> None: ...  # a request has ended with an error
    def gone(self, data: bytes) -> None: ...  # the client of a request has disconnected


class Inference:
    """Checks requests, queues them and serializes their responses. Repeated requests are parsed once (see `request_cache`)."""

    def __init__(
        self,
        core: InferenceCore,
        memory: SharedMemory,
        observer: Observer,
        cache: RequestCache | None = None,
        caller: Caller = NO_CALLER,
        added: bytes = b"",
    ) -> None:
        """Make an entry; `observer` counts its requests, which come from `caller`. See `for_caller` for `added`."""
        self._core = core
        self.memory = memory
        self.observer = observer
        self._caller = caller
        self._added = added
        if cache is None:
            cache = RequestCache()
            core.on_change(cache.forget)
        self._cache = cache

    def for_caller(self, caller: Caller, added: bytes = b"") -> Inference:
        """Return an entry for the requests of one caller, so that they are logged as its own.

        `added`: a serialized ModelInferRequest with parameters that each request gets, in place of its own of the same names.
        """
        return Inference(self._core, self.memory, self.observer, self._cache, caller, added)

    def infer(
        self, data: bytes | memoryview, time_left_s: float | None, reply: Reply, *, many: ManyReplies | None = None
    ) -> Cancel:
        """Check a request and queue it; `reply` is called once, later, on the event loop.

        Args:
            data: a serialized ModelInferRequest; a view must not change any more.
            time_left_s: seconds until the client's deadline; None without one.
            reply: gets the serialized ModelInferResponse, or the error.
            many: takes the responses of a decoupled model; None for a client that takes a single response.

        Returns:
            A function that cancels the request.

        Raises:
            InferenceError: the request is wrong or refused; `reply` is not called.
        """
        sent, request_bytes = data, len(data)
        if self._added:
            data = b"".join((data, self._added))  # protobuf merges concatenated messages
        try:
            cached, request_id, inputs, parameters = self._decoded(data)
        except InferenceError as error:
            if self._core.loads_on_demand and isinstance(error, (NotFoundError, UnavailableError)):
                cancel = self._after_load(sent, time_left_s, reply, many)
                if cancel is not None:
                    return cancel
            self._core.figures.refuse(error)
            raise
        turn = cached.turn
        record = _PendingInference(self, self._caller, cached, request_id, request_bytes, reply)
        queued = InferRequest(
            inputs,
            cached.outputs,
            cached.rows,
            cached.bucket,
            None if time_left_s is None else _deadline(time_left_s),
            record,
            turn.level,
            None if turn.delay_after_s is None else _deadline(turn.delay_after_s),
            None if turn.drop_after_s is None else _deadline(turn.drop_after_s),
            len(data) + cached.shared_bytes,
            record.arrived_ns,
            request_id,
            parameters,
        )
        if many is not None and cached.model.is_decoupled:
            many.begin(wants_empty_final=bool(cached.parameters.get(EMPTY_FINAL)))
            record.many = many
            queued.respond = record.respond
        observer = self.observer
        observer.until -= 1
        is_due = observer.until <= 0 or (observer.tracer is not None and self._caller.parent is not None)
        if is_due and observer.select(record):
            self._capture(record, sent, cached)
        record.submit(self._core, queued)
        return record.cancel

    def _after_load(
        self, data: bytes | memoryview, time_left_s: float | None, reply: Reply, many: ManyReplies | None
    ) -> Cancel | None:
        """Queue a request once its model is loaded; returns what cancels it, or None if no request loads the model.

        Raises:
            InferenceError: the request is refused.
        """
        deadline = None if time_left_s is None else _deadline(time_left_s)
        end: Callable[[], object] | None = None  # ends the wait, or the request after it

        def cancel() -> None:
            nonlocal end
            ending, end = end, None  # breaks a reference cycle
            if ending is not None:
                ending()

        def arrived(error: InferenceError | None) -> None:
            nonlocal end
            end = None
            if error is not None:
                self._core.figures.refuse(error)
                reply(error)
                return
            try:
                end = self.infer(data, None if deadline is None else deadline - time.monotonic(), reply, many=many)
            except InferenceError as refusal:
                reply(refusal)
            except Exception as fault:
                logger.exception("a request that waited for its model failed")
                reply(BackendError(f"the server failed on this request: {type(fault).__name__}"))

        try:
            request = parse_request(bytes(data))
            times = [time_s for time_s in (time_left_s, queue_timeout_s(request)) if time_s is not None]
            end = self._core.demand(request.model_name, min(times, default=None), arrived)
        except InferenceError as error:
            self._core.figures.refuse(error)
            raise
        return None if end is None else cancel

    def _capture(self, record: InferenceRecord, sent: bytes | memoryview, cached: CachedRequest) -> None:
        """Keep the request as its client sent it, unless the client has refused that."""
        capture = self.observer.capture
        if capture is None or cached.parameters.get(CAPTURE, True) is not True:
            return
        copied: list[bytes | None] | None = []
        if cached.input_slices is not None:
            copied = self.memory.copies(cached.input_slices) if cached.shared_bytes <= MAX_COPIED_BYTES else None
        capture.begin(record, sent, copied)

    def failed(self, data: bytes, error: Exception) -> None:
        """Log a request that has ended with an error."""
        if self.observer.log is not None:
            self.observer.failed(self._caller, _asked(data), len(data), error)

    def gone(self, data: bytes) -> None:
        """Log a request whose client has disconnected."""
        if self.observer.log is not None:
            self.observer.failed(self._caller, _asked(data), len(data), None)

    def refused(self, model: str, version: str, error: InferenceError | None) -> None:
        """Count and log a request that has ended before its message was known; None: its client has disconnected."""
        if error is not None:
            self._core.figures.refuse(error)
        self.observer.failed(self._caller, (model, version, ""), 0, error)

    def _decoded(self, data: bytes | memoryview) -> tuple[CachedRequest, bytes, Tensors, Mapping[str, Parameter]]:
        """Return the checked properties of a request, its id, inputs and parameters."""
        pattern = self._cache.match(data)
        if pattern is None:
            return self._understand(bytes(data))
        request_id = bytes(data[pattern.id_start : pattern.id_end]) if pattern.id_end > pattern.id_start else b""
        if request_id and not request_id.isascii():
            return self._understand(bytes(data))
        cached = pattern.cached
        inputs = self._raw_inputs(cached, pattern.layout, data, pattern.offsets)
        parameters = cached.parameters
        if pattern.sequence_end:
            parameters = cached.with_sequence(bytes(data[pattern.sequence_start : pattern.sequence_end]))
        return cached, request_id, inputs, parameters

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
        binding = cached.binding
        if binding is None:
            return RawInputs(layout, data, offsets)
        if not binding.is_bound:
            self.memory.bind(binding, cached.slices, layout.inputs, cached.input_slices)
        return RawInputs(layout, data, offsets, binding.outside)

    def _checked(self, request: ModelInferRequest, data: bytes) -> tuple[CachedRequest, Tensors]:
        model = self._core.model(request.model_name, request.model_version)
        decoded = decode_inputs(request, model, self.memory, data, self._caller.client)
        outputs = requested_names(request, model)
        special = special_outputs(request, model, self.memory)
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
            is_timed=wants_timings(request),
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
            return cached.responses.response(request_id, result, self.memory, since)
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


class _PendingInference(InferenceRecord):
    """The record of a request that this server computes: it serializes the response, and frees all that the request holds.

    Serializing is left to a thread if it takes long.
    """

    __slots__ = ("_cached", "_deferred", "_inference", "_queued", "_reply", "_since", "_use", "many")

    def __init__(
        self,
        inference: Inference,
        caller: Caller,
        cached: CachedRequest,
        request_id: bytes,
        request_bytes: int,
        reply: Reply,
    ) -> None:
        self.caller = caller
        self.model = cached.model
        self.request_id = request_id
        self.rows = cached.rows
        self.request_bytes = request_bytes
        self.arrived_ns = time.monotonic_ns()
        self.is_logged = False
        self.trace = None
        self.captured = None
        self._inference = inference
        self._cached = cached
        self._reply = reply
        memory = inference.memory
        self._since = memory.latest  # see `SharedMemory.check`
        # Keeps the request's regions registered.
        self._use: RegionUse | None = RegionUse(memory, cached.slices) if cached.slices else None
        self.many: ManyReplies | None = None  # takes the responses of a decoupled model
        self._deferred: DeferredResponse | None = None
        self._queued: InferRequest | None = None

    def submit(self, core: InferenceCore, queued: InferRequest) -> None:
        """Queue the request.

        Raises:
            InferenceError: the request is refused.
        """
        self._queued = queued
        self.model.statistics.request_bytes += self.request_bytes
        try:
            core.submit(self.model, queued)
        except Exception as error:
            self._end(error)
            raise
        if self._use is not None:
            self._use.begin()

    def __call__(self, result: Tensors | InferenceError) -> None:
        """Take the outputs or the error."""
        if self._cached.is_timed:
            self.batch = self.model.statistics.latest  # while this batch is the latest
        if type(result) is not Answer or result.batch.is_large or self._cached.takes_long:
            deferred = self._deferred = self._inference.deferred(self._written, self._answered)
            deferred.done(result)
        else:
            self._answered(self._written(result))

    def respond(self, result: Tensors | InferenceError, final: bool, read: Callable[[], None]) -> None:
        """Take the outputs of one response of a decoupled model, or its error."""
        if self.many is not None:
            response = self._written(result)
            if isinstance(response, bytes):
                self.model.statistics.response_bytes += len(response)
            self.many.response(response, final=final, read=read)

    def cancel(self) -> None:
        """Free the request's place in the queue, and drop its response."""
        queued, deferred = self._queued, self._deferred
        if queued is None:
            return
        if deferred is not None:
            deferred.gone()
        self._end(None)
        self.model.scheduler.cancel(queued)

    def _answered(self, response: bytes | InferenceError) -> None:
        if isinstance(response, bytes) and self.many is None:
            self.model.statistics.response_bytes += len(response)
        reply = self._reply
        self._end(response)
        reply(response)

    def _end(self, result: bytes | Exception | None) -> None:
        """Record the end, and drop all references that lead back here, so that no request waits for the garbage collector."""
        if self._use is not None:
            self._use.end()
        if self.is_logged or self.trace is not None or self.captured is not None:
            self._inference.observer.ended(self, result)
        self._queued = self._deferred = None
        self._reply = _discard

    def _written(self, result: Tensors | InferenceError) -> bytes | InferenceError:
        response = self._inference.response(self._cached, self.request_id, self._since, result)
        if not self._cached.is_timed or isinstance(response, InferenceError):
            return response
        batch = None if self.model.is_decoupled else self.batch
        return join_unlocked((response, timing_parameters(self.arrived_ns, batch)))  # protobuf merges concatenated messages


def _deadline(seconds: float) -> float:
    """Return the time in `seconds` from now, on time.monotonic()'s clock."""
    return time.monotonic() + seconds


def _discard(_: bytes | InferenceError) -> None:
    """Do nothing: the reply of a request that has ended."""


def _asked(data: bytes) -> tuple[str, str, str]:
    """Return the model, version and id of a request, as far as they can be read."""
    try:
        request = parse_request(data)
    except InvalidArgumentError:
        return "", "", ""
    return request.model_name, request.model_version, request.id
