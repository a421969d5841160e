"""Opens the calls that headers ask for; calls with one message each way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

from ngh2 import Header

from halfserve.serve.engine.errors import DeadlineExceededError, InferenceError, InvalidArgumentError, UnsupportedError
from halfserve.serve.protocol.inference import Cancel, InferenceEntry
from halfserve.serve.protocol.inference_stream import ENDS_WITH_ERROR
from halfserve.serve.protocol.messages import parse
from halfserve.serve.protocol.service import INFER_PATH, INFER_STREAM_PATH, Service, UnaryMethod
from halfserve.serve.protocol.status import status_of
from halfserve.serve.security.gate import AccessGrant, Gate, client_name
from halfserve.serve.security.memory_budget import MemoryShare
from halfserve.serve.transports.grpc_framing import MessageReader, sole_message, timeout_seconds
from halfserve.serve.transports.nghttp2.pending_requests import Call
from halfserve.serve.transports.nghttp2.session import LARGE_BYTES, GrpcSession, OpenCall
from halfserve.serve.transports.nghttp2.streams import InferStreamCall, StreamCall

logger = logging.getLogger(__name__)


class _OneMessageCall:
    is_unary = True
    __slots__ = ("_encoding", "_ended", "_failed", "_grown_s", "_message", "_reader", "_session", "_stream")

    def __init__(self, session: GrpcSession, stream: int, encoding: bytes | None) -> None:
        self._session = session
        self._stream = stream
        self._encoding = encoding
        self._reader: MessageReader | None = None  # reads a request that comes in pieces or compressed
        self._message: bytes | memoryview | None = None
        self._ended = self._failed = False
        self._grown_s = session.heard_s

    @property
    def held_bytes(self) -> int:
        return 0 if self._reader is None else self._reader.held_bytes

    @property
    def _max_bytes(self) -> int:
        """Size limit of the request in bytes, decompressed."""
        return self._session.limits.max_small_message_bytes

    def take(self, message: bytes | memoryview) -> None:
        self._message = message
        self.end()

    def grew(self) -> None:
        self._grown_s = self._session.heard_s

    def receive(self, data: bytes) -> int:
        """Take received bytes; all are acknowledged, as a message is read only when complete."""
        self._grown_s = self._session.heard_s
        if self._reader is None:
            self._reader = MessageReader(self._max_bytes, self._encoding, self._session.limits.max_inflated_bytes)
        elif self._reader.hold(data):
            return len(data)
        try:
            for message in self._reader.feed(data):
                if self._message is not None:
                    raise InvalidArgumentError("a second message came, expected one; this method is no stream")
                self._message = message
        except InferenceError as error:
            self._fail(error)
        return len(data)

    def receive_last(self, data: bytes) -> int:
        if self._reader is None:
            self._message = sole_message(data, self._max_bytes)
        if self._message is None or self._reader is not None:
            self.receive(data)
        self.end()
        return len(data)

    def end(self) -> None:
        self._ended = True
        if self._failed:
            return
        try:
            if self._reader is not None:
                self._reader.finish()
            if self._message is None:
                raise InvalidArgumentError("the call ended without a message, expected one")  # noqa: TRY301  (handled like the others)
            self._answer(self._message)
        except Exception as error:  # noqa: BLE001  (any failure ends this call with a status)
            self._fail(error)

    def gone(self) -> None: ...

    def give_up(self, error: InferenceError) -> None:
        if not self._ended and not self._failed:
            self._fail(error)

    def give_up_stalled(self, before_s: float) -> None:
        if self._grown_s < before_s:
            self.give_up(DeadlineExceededError("the rest of the request did not come; send it again"))

    def _answer(self, message: bytes | memoryview) -> None:
        raise NotImplementedError

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, InferenceError):
            logger.error("a call failed", exc_info=error)
        self._failed = True
        self._session.fail(self._stream, status_of(error), ended=self._ended)


class InferCall(_OneMessageCall):
    """ModelInfer: queued, and answered after its batch."""

    __slots__ = ("_cancel", "_deadline_s", "_inference")

    def __init__(
        self,
        session: GrpcSession,
        stream: int,
        encoding: bytes | None,
        inference: InferenceEntry,
        time_left_s: float | None,
    ) -> None:
        super().__init__(session, stream, encoding)
        self._inference = inference
        self._deadline_s = None if time_left_s is None else session.heard_s + time_left_s
        self._cancel: Cancel | None = None

    @property
    def _max_bytes(self) -> int:
        return self._session.limits.max_message_bytes

    def gone(self) -> None:
        cancel, self._cancel = self._cancel, None  # breaks a reference cycle
        if cancel is not None:
            cancel()
            self._inference.gone(bytes(self._message or b""))

    def _answer(self, message: bytes | memoryview) -> None:
        if len(message) > LARGE_BYTES:
            self._session.check_room(self._stream)
            self._session.hold(self._stream, len(message), is_last=True)
        deadline_s = self._deadline_s
        time_left_s = None if deadline_s is None else deadline_s - self._session.heard_s  # the message may have arrived slowly
        self._cancel = self._inference.infer(message, time_left_s, self._reply)

    def _reply(self, result: bytes | InferenceError) -> None:
        self._cancel = None
        if isinstance(result, InferenceError):
            self._fail(result)
        else:
            self._session.answer(self._stream, result)

    def _fail(self, error: Exception) -> None:
        self._inference.failed(bytes(self._message or b""), error)
        super()._fail(error)


class MethodCall(_OneMessageCall):
    """Any other unary method, answered at once."""

    __slots__ = ("_method",)

    def __init__(self, session: GrpcSession, stream: int, encoding: bytes | None, method: UnaryMethod) -> None:
        super().__init__(session, stream, encoding)
        self._method = method

    def _answer(self, message: bytes | memoryview) -> None:
        answer = self._method.answer(parse(self._method.request, bytes(message)))
        self._session.answer(self._stream, answer.SerializeToString())


class Calls:
    def __init__(self, service: Service, gate: Gate | None = None) -> None:
        self._service = service
        self._gate = gate
        self._infer = INFER_PATH.encode()
        self._infer_stream = INFER_STREAM_PATH.encode()

    def route(self, fields: Sequence[Header], share: MemoryShare) -> OpenCall:
        """The opener of calls with these headers; a refused call opens only to end.

        Args:
            fields: the headers of a call.
            share: share of the memory budget; trusted once the connection has shown a token, or if none is required.
        """
        headers = dict(fields)
        if self._gate is None:
            share.trust()
            return self._open(headers, None)
        try:
            given = self._gate.admit_method(headers.get(b":path", b"").decode("latin-1"), fields)
        except InferenceError as error:
            return partial(RefusedCall, error=error)
        if given.is_trusted:
            share.trust()
        open_call = self._open(headers, given)
        if isinstance(open_call, _InferOpener) or not given.is_counted:
            return open_call
        return partial(_counted, given, open_call)

    def _open(self, headers: dict[bytes, bytes], given: AccessGrant | None) -> OpenCall:
        service = self._service if given is None or given.sees_all else given.service(self._service)
        path = headers.get(b":path", b"")
        encoding = headers.get(b"grpc-encoding")
        try:
            time_left = timeout_seconds(headers.get(b"grpc-timeout"))
        except InferenceError as error:
            return partial(RefusedCall, error=error)
        if path == self._infer:
            return _UnaryInferOpener(service, headers, encoding, time_left, given)
        if path == self._infer_stream:
            return _StreamInferOpener(service, headers, encoding, time_left, given)
        name = path.decode("ascii", "replace")
        unary = service.unary.get(name)
        if unary is not None:
            return partial(MethodCall, encoding=encoding, method=unary if given is None else given.unary(unary))
        method = service.streams.get(name)
        if method is not None:
            if method.with_headers is not None:
                method = method.with_headers(headers)
            method = method if given is None else given.stream(method)
            return partial(StreamCall, encoding=encoding, method=method, time_left_s=time_left)
        return partial(RefusedCall, error=UnsupportedError(f"{name} is not served here; server reflection lists what is"))


class _InferOpener:
    """Opens inference calls with one list of headers on one connection."""

    __slots__ = (
        "_encoding",
        "_given",
        "_headers",
        "_inference",
        "_service",
        "_time_left_s",
    )

    def __init__(
        self,
        service: Service,
        headers: dict[bytes, bytes],
        encoding: bytes | None,
        time_left_s: float | None,
        given: AccessGrant | None,
    ) -> None:
        self._inference: InferenceEntry | None = None  # made with the first call, as the peer is not known before
        self._service = service
        self._headers = headers
        self._encoding = encoding
        self._time_left_s = time_left_s
        self._given = given  # permissions

    def __call__(self, session: GrpcSession, stream: int) -> Call:
        raise NotImplementedError

    def _opened(self, session: GrpcSession) -> InferenceEntry:
        """Make the entry for the requests of this client, with its permissions applied to each."""
        given, peer = self._given, session.peer
        holder = "" if given is None else given.holder
        whole = self._service.inference_of(peer, self._headers, holder, partial(client_name, given, peer))
        inference = self._inference = whole if given is None else given.inference(whole, peer)
        return inference


class _UnaryInferOpener(_InferOpener):
    __slots__ = ()

    def __call__(self, session: GrpcSession, stream: int) -> Call:
        inference = self._inference
        if inference is None:
            inference = self._opened(session)
        return InferCall(session, stream, self._encoding, inference, self._time_left_s)


class _StreamInferOpener(_InferOpener):
    __slots__ = ()

    def __call__(self, session: GrpcSession, stream: int) -> Call:
        inference = self._inference or self._opened(session)
        name, value = ENDS_WITH_ERROR
        ends = self._headers.get(name) == value
        return InferStreamCall(session, stream, self._encoding, inference, self._time_left_s, ends_with_error=ends)


def _counted(given: AccessGrant, open_call: OpenCall, session: GrpcSession, stream: int) -> Call:
    """Open a call unless its client exceeds its rate limit."""
    try:
        given.charge(session.peer)
    except InferenceError as error:
        return RefusedCall(session, stream, error)
    return open_call(session, stream)


class RefusedCall:
    """A call that ends as soon as it is opened."""

    held_bytes = 0
    is_unary = False  # so that its headers are not cached: later calls may be served

    def __init__(self, session: GrpcSession, stream: int, error: InferenceError) -> None:
        # In the next loop iteration: the session does not know this call yet.
        asyncio.get_running_loop().call_soon(partial(session.fail, stream, status_of(error), ended=False))

    def receive(self, data: bytes) -> int:
        return len(data)

    def receive_last(self, data: bytes) -> int:
        return len(data)

    def take(self, message: bytes | memoryview) -> None: ...
    def grew(self) -> None: ...
    def end(self) -> None: ...
    def gone(self) -> None: ...
    def give_up(self, error: InferenceError) -> None: ...
    def give_up_stalled(self, before_s: float) -> None: ...
