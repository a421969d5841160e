"""Receive a request's body within its bounds, and notice when the client goes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from serve.engine.errors import DeadlineExceededError, InvalidArgumentError, MessageTooLargeError, UnavailableError
from serve.http.content_coding import decompressed
from serve.http.options import MOMENT_S, HttpLimits, memory_of
from serve.security.memory_budget import MemoryBudget

T = TypeVar("T")
FULL = "the server holds as many requests and unread answers as it may (--max-buffered-mib); retry with back-off"
SMALL_BYTES = 1024  # even what inflates a thousandfold is quickly inflated


class _Received:
    """What is held for one request; it is refused while the rest of it is waited for, where others need the memory.

    Attributes:
        share: of the memory.
        size: bytes of the body.
    """

    def __init__(self, budget: MemoryBudget) -> None:
        self.share = budget.share(is_known=True, press=self._press)
        self._waits: asyncio.Timeout | None = None
        self._is_refused = False
        self.size = 0

    def hold(self, more: int) -> None:
        """Hold so many bytes more.

        Raises:
            UnavailableError: it is too much, with what is held for others.
        """
        self.size += more
        self.share.resize(memory_of(self.size))
        self._is_refused |= self.share.is_too_much and not self.share.goes_on()
        self.check()

    def check(self) -> None:
        """Check that it may still be received.

        Raises:
            UnavailableError: others need the memory.
        """
        if self._is_refused:
            self.share.close()
            raise UnavailableError(FULL)

    async def within(self, limit_s: float, coming: Awaitable[T]) -> T:
        """What comes.

        Raises:
            TimeoutError: it has not come in time, or is to come no more.
        """
        try:
            async with asyncio.timeout(limit_s) as self._waits:
                return await coming
        finally:
            self._waits = None

    def _press(self) -> None:
        if self._waits is not None and self.share.excess:
            self._is_refused = True
            self._waits.reschedule(0.0)


class BodyReader:
    """Receives bodies, and counts what is held for each request until it is answered."""

    def __init__(self, limits: HttpLimits, budget: MemoryBudget) -> None:
        self._limits = limits
        self._budget = budget

    async def read(self, request: Request) -> bytes:
        """The whole body, decompressed. It counts as held until the task that asks for it, which answers the request, is over.

        Raises:
            MessageTooLargeError: it is over the limit; raised before it is received where its length is told.
            UnavailableError: too much is held.
            DeadlineExceededError: it stopped growing.
            InvalidArgumentError, UnsupportedError: it does not decompress.
            ClientDisconnect: the client has gone.
        """
        limit = self._limits.max_body_bytes
        return await self._read(request, limit, min(limit, self._limits.max_inflated_bytes), "split the request")

    async def read_small(self, request: Request) -> bytes:
        """The same of a request that carries neither tensors nor a model's files."""
        limit = min(self._limits.max_body_bytes, self._limits.max_small_body_bytes)
        return await self._read(request, limit, limit, "a request to this path takes no more")

    def hold_answer(self, request: Request, size: int) -> None:
        """Count `size` bytes for an answer in place of its request, until the connection has it.

        Raises:
            UnavailableError: memory does not hold it, with what others do not read.
        """
        share = request.state.received.share
        share.resize(memory_of(size))
        if share.is_crowded_out:
            share.close()
            raise UnavailableError(FULL)

    async def understand(self, body: bytes, read: Callable[[bytes], T]) -> T:
        """What `read` makes of a body; on a thread where it is large, so that others need not wait."""
        return await asyncio.to_thread(read, body) if len(body) > self._limits.inline_bytes else read(body)

    async def _read(self, request: Request, limit: int, inflated_limit: int, advice: str) -> bytes:
        length = request.headers.get("content-length", "0")
        if length.isascii() and length.isdigit() and int(length) > limit:
            raise MessageTooLargeError(int(length), limit, advice)
        received = request.state.received = self._receive()
        pieces: list[bytes] = []
        more = True
        while more:
            piece, more = await self._next(request, received)
            received.hold(len(piece))
            if received.size > limit:
                raise MessageTooLargeError(None, limit, advice)
            pieces.append(piece)
        coding = request.headers.get("content-encoding", "")
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if not coding:
            return body
        if len(body) <= SMALL_BYTES:
            body = decompressed(body, coding, inflated_limit)
        else:
            body = await asyncio.to_thread(decompressed, body, coding, inflated_limit)
        received.hold(len(body) - received.size)
        return body

    def _receive(self) -> _Received:
        received = _Received(self._budget)
        task = asyncio.current_task()
        if task is not None:  # as it always is here
            task.add_done_callback(lambda _: received.share.close())
        return received

    async def _next(self, request: Request, received: _Received) -> tuple[bytes, bool]:
        message = await self._message(request, received)
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        return message.get("body", b""), message.get("more_body", False)

    async def _message(self, request: Request, received: _Received) -> Message:
        for limit_s in (self._limits.stall_s, MOMENT_S):
            with contextlib.suppress(TimeoutError):
                return await received.within(limit_s, request.receive())
            received.check()
        raise DeadlineExceededError("the rest of the request did not come; send it again")


async def client_gone(request: Request) -> None:
    """Return when the client has closed the connection; to be called once the body is received."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def header_length(request: Request, body_bytes: int) -> int | None:
    """How many bytes at the body's start are JSON, as Inference-Header-Content-Length says; None where all are.

    Raises:
        InvalidArgumentError: the header is no number, or more than the body has.
    """
    text = request.headers.get("inference-header-content-length")
    if text is None:
        return None
    length = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1
    if not 0 <= length <= body_bytes:
        raise InvalidArgumentError(
            f"Inference-Header-Content-Length is {text[:20]!r}, expected a number of bytes up to the body's {body_bytes}"
        )
    return length
