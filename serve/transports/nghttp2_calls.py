"""Calls over a GrpcConnection: inference, the other unary methods, and streams."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from functools import partial
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from serve.engine.errors import DeadlineExceededError, InferenceError, InvalidArgumentError, UnsupportedError
from serve.protocol.inference import Cancel
from serve.protocol.service import INFER_PATH, Service, StreamMethod, UnaryMethod
from serve.protocol.status import status_of
from serve.transports.grpc_framing import MessageReader
from serve.transports.grpc_headers import timeout_seconds
from serve.transports.nghttp2_connection import Call, GrpcConnection

logger = logging.getLogger(__name__)
M = TypeVar("M", bound=Message)


class Calls:
    """Opens the call that a path names."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._unary = {path.encode(): method for path, method in service.unary.items()}
        self._streams = {path.encode(): method for path, method in service.streams.items()}
        self._infer = INFER_PATH.encode()

    def open(self, connection: GrpcConnection, stream: int, headers: dict[bytes, bytes]) -> Call:
        """The call that these headers begin; one that is refused already takes no more than its end."""
        path = headers.get(b":path", b"")
        try:
            time_left = timeout_seconds(headers.get(b"grpc-timeout"))
            reader = MessageReader(connection.limits.max_message_bytes, headers.get(b"grpc-encoding"))
            if path == self._infer:
                return InferCall(connection, stream, reader, self._service, time_left)
            unary = self._unary.get(path)
            if unary is not None:
                return UnaryCall(connection, stream, reader, unary)
            method = self._streams.get(path)
            if method is not None:
                return StreamCall(connection, stream, reader, method, time_left)
            name = path.decode("ascii", "replace")
            raise UnsupportedError(f"{name} is not served here; server reflection lists what is")
        except InferenceError as error:
            return RefusedCall(connection, stream, error)


class _Unary:
    """A call that takes one message and gives one."""

    def __init__(self, connection: GrpcConnection, stream: int, reader: MessageReader) -> None:
        self._connection = connection
        self._stream = stream
        self._reader = reader
        self._message: bytes | None = None
        self._ended = False
        self._grown_s = connection.heard_s

    @property
    def held_bytes(self) -> int:
        """Bytes of an unfinished message."""
        return self._reader.held_bytes

    def receive(self, data: bytes) -> int:
        """Take what the client sent; all of it may be sent again, as a message must be whole before it can be read."""
        self._grown_s = self._connection.heard_s
        try:
            for message in self._reader.feed(data):
                if self._message is not None:
                    raise InvalidArgumentError("a second message came, expected one; this method is no stream")
                self._message = message
        except InferenceError as error:
            self._fail(error)
        return len(data)

    def end(self) -> None:
        """The client will send no more: answer."""
        self._ended = True
        try:
            self._reader.finish()
            if self._message is None:
                raise InvalidArgumentError("the call ended without a message, expected one")  # noqa: TRY301  (see above)
            self._answer(self._message)
        except Exception as error:  # noqa: BLE001  (whatever went wrong must end this call with a status, not the connection)
            self._fail(error)

    def gone(self) -> None:
        """Nothing to stop: the answer was given at once."""

    def give_up_stalled(self, before_s: float) -> None:
        """End the call if the client owes the rest of its message since `before_s`."""
        if not self._ended and self._grown_s < before_s:
            self._fail(DeadlineExceededError("the rest of the request did not come; send it again"))

    def _answer(self, message: bytes) -> None:
        raise NotImplementedError

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, InferenceError):
            logger.error("a call failed", exc_info=error)
        self._connection.fail(self._stream, status_of(error), ended=self._ended)


class InferCall(_Unary):
    """ModelInfer: queued, and answered when its batch has run."""

    def __init__(
        self,
        connection: GrpcConnection,
        stream: int,
        reader: MessageReader,
        service: Service,
        time_left_s: float | None,
    ) -> None:
        super().__init__(connection, stream, reader)
        self._service = service
        self._time_left_s = time_left_s
        self._cancel: Cancel | None = None

    def gone(self) -> None:
        """Free the request's place in the queue."""
        if self._cancel is not None:
            self._cancel()

    def _answer(self, message: bytes) -> None:
        self._cancel = self._service.infer(message, self._time_left_s, self._reply)

    def _reply(self, result: bytes | InferenceError) -> None:
        self._cancel = None
        if isinstance(result, InferenceError):
            self._fail(result)
        else:
            self._connection.answer(self._stream, result)


class UnaryCall(_Unary):
    """Any other method with one message each way, answered at once."""

    def __init__(self, connection: GrpcConnection, stream: int, reader: MessageReader, method: UnaryMethod) -> None:
        super().__init__(connection, stream, reader)
        self._method = method

    def _answer(self, message: bytes) -> None:
        answer = self._method.answer(parse(self._method.request, message))
        self._connection.answer(self._stream, answer.SerializeToString())


class RefusedCall:
    """A call that was over when it began."""

    held_bytes = 0

    def __init__(self, connection: GrpcConnection, stream: int, error: InferenceError) -> None:
        # In the next turn of the loop: the connection does not know of this call yet.
        asyncio.get_running_loop().call_soon(partial(connection.fail, stream, status_of(error), ended=False))

    def receive(self, data: bytes) -> int:
        """Drop it."""
        return len(data)

    def end(self) -> None:
        """It has been answered."""

    def gone(self) -> None:
        """It has been answered."""

    def give_up_stalled(self, before_s: float) -> None:
        """It has been answered."""


class StreamCall:
    """A method with any number of messages each way, as a task of its own."""

    def __init__(
        self,
        connection: GrpcConnection,
        stream: int,
        reader: MessageReader,
        method: StreamMethod,
        time_left_s: float | None,
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._reader = reader
        self._method = method
        self._messages: deque[bytes] = deque()
        self._arrived = asyncio.Event()
        self._unread = 0  # bytes that the client may not send again yet
        self._ended = self._begun = False
        self._broken: InferenceError | None = None
        self._task = asyncio.get_running_loop().create_task(self._run(time_left_s))

    @property
    def held_bytes(self) -> int:
        """Bytes of an unfinished message."""
        return self._reader.held_bytes

    def receive(self, data: bytes) -> int:
        """Take what the client sent; it may send more at once only while nothing waits to be read."""
        try:
            self._messages.extend(self._reader.feed(data))
        except InferenceError as error:
            self._broken = error
        self._arrived.set()
        if not self._messages:
            return len(data)
        self._unread += len(data)
        return 0

    def end(self) -> None:
        """The client will send no more."""
        self._ended = True
        self._arrived.set()

    def gone(self) -> None:
        """Stop the method."""
        self._task.cancel()

    def give_up_stalled(self, before_s: float) -> None:
        """A stream may be silent for as long as it likes."""

    async def _run(self, time_left_s: float | None) -> None:
        try:
            async with asyncio.timeout(time_left_s):
                async for response in self._method.answer(self._requests()):
                    self._begin()
                    await self._connection.send(self._stream, response.SerializeToString())
        except asyncio.CancelledError:
            raise
        except TimeoutError:
            self._fail(DeadlineExceededError("the call's deadline has passed"))
        except Exception as error:  # noqa: BLE001  (see _Unary.end)
            self._fail(error)
        else:
            self._begin()
            self._connection.finish(self._stream, ended=self._ended)

    async def _requests(self) -> AsyncIterator[Message]:
        while True:
            while self._messages:
                yield parse(self._method.request, self._messages.popleft())
            self._connection.give_back(self._stream, self._unread)
            self._unread = 0
            if self._broken is not None:
                raise self._broken
            if self._ended:
                self._reader.finish()
                return
            self._arrived.clear()
            await self._arrived.wait()

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self._connection.begin(self._stream)

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, InferenceError):
            logger.error("a call failed", exc_info=error)
        self._connection.fail(self._stream, status_of(error), ended=self._ended, begun=self._begun)


def parse(message: type[M], data: bytes) -> M:
    """The message that these bytes are.

    Raises:
        InvalidArgumentError: they are none.
    """
    try:
        return message.FromString(data)
    except DecodeError:
        raise InvalidArgumentError(
            f"the request is not a {message.DESCRIPTOR.name} message; check the client's .proto files"
        ) from None
