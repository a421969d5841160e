"""Streaming calls.

Flow control joins both directions: requests without a response, and unread responses, withhold the receive window.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace

from google.protobuf.message import Message

from halfserve.serve.engine.errors import DeadlineExceededError, InferenceError
from halfserve.serve.protocol.inference import InferenceEntry
from halfserve.serve.protocol.inference_stream import InferenceStream
from halfserve.serve.protocol.messages import parse
from halfserve.serve.protocol.rpc import Rpc, RpcCall
from halfserve.serve.protocol.status import status_of
from halfserve.serve.transports.grpc_framing import MessageReader
from halfserve.serve.transports.nghttp2.session import LARGE_BYTES, STREAM_BYTES, GrpcSession

logger = logging.getLogger(__name__)
MAX_UNANSWERED = 256  # requests of one stream before reading pauses


class _Stream:
    """Base of both kinds of streaming calls."""

    is_unary = False

    def __init__(self, session: GrpcSession, stream: int, encoding: bytes | None, max_message_bytes: int) -> None:
        self._session = session
        self._stream = stream
        self._reader = MessageReader(max_message_bytes, encoding, session.limits.max_inflated_bytes)
        self._pieces: deque[bytes] = deque()  # received, not parsed
        self._withheld = 0  # bytes not acknowledged
        self._ended = self._headers_sent = False

    @property
    def held_bytes(self) -> int:
        return self._reader.held_bytes

    def receive(self, data: bytes) -> int:
        raise NotImplementedError

    def receive_last(self, data: bytes) -> int:
        free = self.receive(data)
        self.end()
        return free

    def end(self) -> None:
        raise NotImplementedError

    def give_up_stalled(self, before_s: float) -> None:
        """Nothing: a stream may be silent."""

    def _begin(self) -> None:
        if not self._headers_sent:
            self._headers_sent = True
            self._session.begin(self._stream)


class InferStreamCall(_Stream):
    """ModelStreamInfer without a task: requests are pushed in, responses are pushed out."""

    def __init__(
        self,
        session: GrpcSession,
        stream: int,
        encoding: bytes | None,
        inference: InferenceEntry,
        time_left_s: float | None,
        *,
        ends_with_error: bool = False,
    ) -> None:
        """`ends_with_error`: the first request that fails ends the call with its status."""
        super().__init__(session, stream, encoding, session.limits.max_message_bytes)
        self._requests = InferenceStream(inference, self, ends_with_error=ends_with_error)
        self._unread: list[Callable[[], None]] = []  # to be called once the client has caught up
        self._coming: Iterator[bytes] = iter(())  # messages of the current piece
        self._counted = 0  # bytes of unanswered requests reported to the session
        self._is_over = False
        self._is_read, self._is_reading, self._waits = True, False, False
        self._loop = asyncio.get_running_loop()
        self._deadline_s = None if time_left_s is None else self._loop.time() + time_left_s
        self._timer = None if self._deadline_s is None else self._loop.call_at(self._deadline_s, self._expire)

    def receive(self, data: bytes) -> int:
        """Take requests while there is room and time; the bytes are acknowledged at once if all were taken."""
        if not self._is_read or not self._reader.hold(data):
            self._pieces.append(data)
            self._is_read = False
            self._read()
        if self._is_read and not self._is_full():
            return len(data)
        self._withheld += len(data)
        return 0

    def end(self) -> None:
        self._ended = True
        if self._is_read:
            self._all_read()

    def gone(self) -> None:
        self._stop()

    def give_up(self, error: InferenceError) -> None:
        self.fail(error)

    def _read(self) -> None:
        """Take requests until there are none, no room for more, or the message quota is used up."""
        if self._is_reading or self._is_over:  # errors are answered while reading
            return
        self._is_reading = True
        try:
            while not (self._is_read or self._is_over or self._is_full()):
                if not self._session.quota.may_read():
                    self._wait_for_turn()
                    return
                self._take_one()
        except InferenceError as error:
            self.fail(error)
        finally:
            self._is_reading = False
        if self._is_read:
            self._all_read()

    def _take_one(self) -> None:
        message = next(self._coming, None)
        if message is not None:
            left_s = None if self._deadline_s is None else self._deadline_s - self._loop.time()
            self._requests.receive(message, left_s)
            self._count()
            self._session.quota.spend(len(message))
        elif self._pieces:
            self._coming = self._reader.feed(self._pieces.popleft())
        else:
            self._is_read = True

    def _wait_for_turn(self) -> None:
        if not self._waits:
            self._waits = True
            self._session.quota.when_next(self._have_turn)

    def _have_turn(self) -> None:
        self._waits = False
        self._read()

    def _all_read(self) -> None:
        if self._ended:
            try:
                self._reader.finish()
            except InferenceError as error:
                self.fail(error)
            self._finish_if_done()
        elif self._withheld and not self._is_full():
            self._session.give_back(self._stream, self._withheld)
            self._withheld = 0

    def send(self, response: bytes) -> None:
        self._begin()
        self._session.send(self._stream, response)
        self.request_ended()

    def when_read(self, then: Callable[[], None]) -> None:
        """Call `then` once the client can take another response: now, unless it is slow."""
        if self._session.is_behind(self._stream):
            self._unread.append(then)
            self._session.when_read(self._stream, self._read_on)
        else:
            then()

    def request_ended(self) -> None:
        """Count a request that was answered, or has ended without a message."""
        self._count()
        self._read_on()

    def _count(self) -> None:
        """Count the bytes of unanswered requests, if they are or were large."""
        held = self._requests.held_bytes
        if (held > LARGE_BYTES or self._counted) and not self._is_over:
            self._counted = held
            self._session.hold(self._stream, STREAM_BYTES + held)

    def _read_on(self) -> None:
        """Read on, if there is room: a response was sent or read."""
        if self._unread and self._session.is_behind(self._stream):
            self._session.when_read(self._stream, self._read_on)
        elif self._unread:
            unread, self._unread = self._unread, []
            for then in unread:
                then()
        if not self._is_read:
            self._read()
        elif self._withheld or self._ended:
            self._all_read()

    def _is_full(self) -> bool:
        if self._session.is_behind(self._stream):
            self._session.when_read(self._stream, self._read_on)
            return True
        return len(self._requests) > MAX_UNANSWERED or (self._counted > 0 and self._session.share.is_short)

    def _finish_if_done(self) -> None:
        if not self._requests and not self._is_over:
            self._begin()
            self._session.finish(self._stream, ended=True)
            self._stop()

    def _expire(self) -> None:
        self.fail(DeadlineExceededError("the call's deadline has passed"))

    def fail(self, error: Exception) -> None:
        if not self._is_over:
            self._session.fail(self._stream, status_of(error), ended=self._ended, headers_sent=self._headers_sent)
            self._stop()

    def _stop(self) -> None:
        self._is_over = True
        self._pieces.clear()
        self._unread.clear()
        self._coming = iter(())
        self._requests.cancel()
        if self._timer is not None:
            self._timer.cancel()


class StreamCall(_Stream):
    """Any other streaming method, as a task."""

    def __init__(
        self, session: GrpcSession, stream: int, encoding: bytes | None, rpc: Rpc, call: RpcCall, time_left_s: float | None
    ) -> None:
        super().__init__(session, stream, encoding, session.limits.max_small_message_bytes)
        self._rpc = rpc
        self._arrived = asyncio.Event()
        self._task: asyncio.Task[None] | None = asyncio.get_running_loop().create_task(
            self._run(replace(call, send=self._send), time_left_s)
        )

    def receive(self, data: bytes) -> int:
        """Queue received bytes; they are acknowledged at once only inside an incomplete message."""
        if not self._withheld and self._reader.hold(data):
            return len(data)
        self._pieces.append(data)
        self._withheld += len(data)
        self._arrived.set()
        return 0

    def end(self) -> None:
        self._ended = True
        self._arrived.set()

    def gone(self) -> None:
        self._cancel()

    def give_up(self, error: InferenceError) -> None:
        self._cancel()
        self._fail(error)

    def _cancel(self) -> None:
        """Cancel the task and let go of it: its exception refers to frames that refer to this call."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    async def _run(self, call: RpcCall, time_left_s: float | None) -> None:
        try:
            async with asyncio.timeout(time_left_s):
                await self._rpc.method(self._requests(), call)
        except asyncio.CancelledError:
            raise
        except TimeoutError:
            self._fail(DeadlineExceededError("the call's deadline has passed"))
        except Exception as error:  # noqa: BLE001  (any failure ends this call with a status)
            self._fail(error)
        else:
            self._begin()
            self._session.finish(self._stream, ended=self._ended)

    async def _send(self, response: Message) -> None:
        self._begin()
        self._session.send(self._stream, response.SerializeToString())
        if self._session.is_behind(self._stream):
            caught_up = asyncio.Event()
            self._session.when_read(self._stream, caught_up.set)
            await caught_up.wait()

    async def _requests(self) -> AsyncIterator[Message]:
        while True:
            while self._pieces:
                for message in self._reader.feed(self._pieces.popleft()):
                    await self._wait_for_turn()
                    self._session.quota.spend(len(message))
                    yield parse(self._rpc.request, message)
            self._session.give_back(self._stream, self._withheld)
            self._withheld = 0
            if self._ended:
                self._reader.finish()
                return
            self._arrived.clear()
            await self._arrived.wait()

    async def _wait_for_turn(self) -> None:
        quota = self._session.quota
        while not quota.may_read():
            next_turn = asyncio.Event()
            quota.when_next(next_turn.set)
            await next_turn.wait()

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, InferenceError):
            logger.error("a call failed", exc_info=error)
        self._session.fail(self._stream, status_of(error), ended=self._ended, headers_sent=self._headers_sent)
