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
from halfserve.serve.protocol.rpc import Rpc, RpcCall, layered
from halfserve.serve.protocol.service import INFER_PATH, INFERENCE_PATHS, Service
from halfserve.serve.protocol.status import status_of
from halfserve.serve.security.client_limits import network_of
from halfserve.serve.security.gate import AccessGrant, Gate
from halfserve.serve.transports.grpc_framing import MessageReader, sole_message, timeout_seconds
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

    def _hold(self, message: bytes | memoryview) -> None:
        """Count the memory of a large request. Raises RateLimitedError: there is no room for it."""
        if len(message) > LARGE_BYTES:
            self._session.check_room(self._stream)
            self._session.hold(self._stream, len(message), is_last=True)

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
        encoding: bytes | None,
        inference: InferenceEntry,
        time_left_s: float | None,
        session: GrpcSession,
        stream: int,
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
        self._hold(message)
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
    """Any other RPC with one message each way, as a task."""

    __slots__ = ("_call", "_deadline_s", "_rpc", "_task")

    def __init__(
        self,
        session: GrpcSession,
        stream: int,
        encoding: bytes | None,
        rpc: Rpc,
        call: RpcCall,
        time_left_s: float | None,
    ) -> None:
        super().__init__(session, stream, encoding)
        self._rpc = rpc
        self._call = call
        self._deadline_s = None if time_left_s is None else session.heard_s + time_left_s
        self._task: asyncio.Task[None] | None = None

    @property
    def _max_bytes(self) -> int:
        limits = self._session.limits
        return limits.max_message_bytes if self._rpc.is_large else limits.max_small_message_bytes

    def gone(self) -> None:
        task, self._task = self._task, None  # breaks a reference cycle: its exception refers to frames that refer to this call
        if task is not None:
            task.cancel()

    def _answer(self, message: bytes | memoryview) -> None:
        self._hold(message)
        self._task = asyncio.get_running_loop().create_task(self._run(bytes(message)))

    async def _run(self, message: bytes) -> None:
        try:
            async with asyncio.timeout_at(self._deadline_s):
                response = await self._rpc.method(parse(self._rpc.request, message), self._call)
            self._session.answer(self._stream, response.SerializeToString())
        except asyncio.CancelledError:
            raise
        except TimeoutError:
            self._fail(DeadlineExceededError("the call's deadline has passed"))
        except Exception as error:  # noqa: BLE001  (any failure ends this call with a status)
            self._fail(error)


class Calls:
    """The calls that one port serves."""

    def __init__(self, service: Service, gate: Gate | None = None) -> None:
        self._service = service
        self._gate = gate
        self._rpcs = service.rpcs if gate is None else {path: layered(rpc, gate.layer) for path, rpc in service.rpcs.items()}

    def route(self, fields: Sequence[Header], session: GrpcSession) -> OpenCall:
        """Return the opener of a connection's calls with these headers; a refused call opens only to end.

        The connection's memory is trusted once it has shown a token, or if none is required.
        """
        headers = dict(fields)
        path = headers.get(b":path", b"").decode("ascii", "replace")
        grant: AccessGrant | None = None
        try:
            if self._gate is not None:
                grant = self._gate.admit_call(self._rpcs, path, fields)
            if grant is None or grant.is_trusted:
                session.share.trust()
            time_left_s = timeout_seconds(headers.get(b"grpc-timeout"))
        except InferenceError as error:
            return partial(RefusedCall, error=error)
        service = self._service if grant is None else grant.service(self._service)
        call = RpcCall(server=service, peer=session.peer, headers=headers, grant=grant)
        encoding = headers.get(b"grpc-encoding")
        if path in INFERENCE_PATHS:
            if grant is None:
                inference: InferenceEntry = service.inference_of(call.peer, headers, "", partial(network_of, call.peer))
            else:
                inference = grant.inference_of(service, call)
            if path == INFER_PATH:  # arguments by position, as this is faster
                return partial(InferCall, encoding, inference, time_left_s)
            name, value = ENDS_WITH_ERROR
            return partial(
                InferStreamCall,
                encoding=encoding,
                inference=inference,
                time_left_s=time_left_s,
                ends_with_error=headers.get(name) == value,
            )
        rpc = self._rpcs.get(path)
        if rpc is None:
            return partial(RefusedCall, error=UnsupportedError(f"{path} is not served here; server reflection lists what is"))
        opens: type[MethodCall | StreamCall] = StreamCall if rpc.is_stream else MethodCall
        return partial(opens, encoding=encoding, rpc=rpc, call=call, time_left_s=time_left_s)


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
