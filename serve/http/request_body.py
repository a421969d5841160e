"""Receive a request's body within its bounds, decompress it, and notice when the client goes."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import zlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from halfserve.serve.engine.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    MessageTooLargeError,
    UnavailableError,
    UnsupportedError,
)
from halfserve.serve.engine.execution.output_backlog import LARGE_BYTES
from halfserve.serve.http.http_options import MOMENT_S, HttpLimits, memory_of
from halfserve.serve.http.request_parser import CLIENT_GONE
from halfserve.serve.protocol.large_bytes import join_unlocked
from halfserve.serve.protocol.messages import WINDOW_BITS, inflate
from halfserve.serve.security.memory_budget import MemoryBudget

T = TypeVar("T")
FULL = "the server holds as many requests and unread answers as it may (--max-buffered-mib); retry with back-off"
TEXTS_ADVICE = "send fewer texts at once, or start the server with a larger --max-text-mib"
UNCOMPRESSED = "send it uncompressed"
SMALL_BYTES = 1024  # inflated on the event loop: a thousandfold of this is still quick
LEVEL = 1  # higher levels take several times as long and hardly shrink tensors further
SMALLEST_WORTH_BYTES = 1024


class RequestMemory:
    """The memory of one request, which may be refused while the rest of its body is awaited, if other clients need memory."""

    def __init__(self, budget: MemoryBudget) -> None:
        self.share = budget.share(is_known=True, press=self._press)  # the connection's share of the memory budget
        self._waits: asyncio.Timeout | None = None
        self._is_refused = False
        self.size = 0  # bytes of the body

    def hold(self, more: int) -> None:
        """Count `more` bytes. Raises UnavailableError: the memory budget is spent."""
        self.size += more
        self.share.resize(memory_of(self.size))
        self._is_refused |= self.share.is_too_much and not self.share.goes_on()
        self.check()

    def grow(self, more: int) -> None:
        """Count `more` bytes for what is made of the body, before it is made.
        Raises UnavailableError: the memory budget is spent, and other requests hold most of it.
        """
        self.share.add(more)
        if self.share.is_crowded_out:
            self.share.close()
            raise UnavailableError(FULL)

    def shrink(self, less: int) -> None:
        """Give back bytes that are held no longer."""
        self.share.add(-less)

    def check(self) -> None:
        """Check that the body may still be received. Raises UnavailableError: other clients need the memory."""
        if self._is_refused:
            self.share.close()
            raise UnavailableError(FULL)

    async def within(self, limit_s: float, coming: Awaitable[T]) -> T:
        """Wait for `coming`. Raises TimeoutError: after `limit_s` seconds, or as soon as the request is refused."""
        try:
            async with asyncio.timeout(limit_s) as self._waits:
                return await coming
        finally:
            self._waits = None

    def _press(self) -> None:
        if self._waits is not None and not self._waits.expired() and self.share.excess:
            self._is_refused = True
            self._waits.reschedule(0.0)


class BodyReader:
    """Receives bodies, and counts the memory of each request until it is answered."""

    def __init__(self, limits: HttpLimits, budget: MemoryBudget) -> None:
        self._limits = limits
        self._budget = budget

    async def read(self, request: Request) -> bytes:
        """Return the whole body, decompressed. It counts until the current task, which answers the request, ends.

        Raises:
            MessageTooLargeError: it is over the limit; raised before it is received if its length is given.
            UnavailableError: the memory budget is spent.
            DeadlineExceededError: no more bytes arrived.
            InvalidArgumentError, UnsupportedError: it cannot be decompressed.
            ClientDisconnect: the client has disconnected.
        """
        limit = self._limits.max_body_bytes
        return await self._read(request, limit, min(limit, self._limits.max_inflated_bytes), "split the request")

    async def read_small(self, request: Request) -> bytes:
        """Return the body of a request without tensors or model files, which has a lower limit."""
        limit = min(self._limits.max_body_bytes, self._limits.max_small_body_bytes)
        return await self._read(request, limit, limit, "a request to this path takes no more")

    async def read_texts(self, request: Request) -> bytes:
        """Return the body of a request whose texts are to be tokenized, as received and decompressed."""
        limit = min(self._limits.max_body_bytes, self._limits.max_text_body_bytes)
        return await self._read(request, limit, limit, TEXTS_ADVICE, TEXTS_ADVICE)

    def hold_answer(self, request: Request, size: int) -> None:
        """Count `size` bytes for an answer in place of its request, until the connection takes it over.
        Raises UnavailableError: the memory budget is spent.
        """
        memory = memory_held(request)
        memory.grow(memory_of(size) - memory.share.size)

    async def understand(self, body: bytes, read: Callable[[bytes], T]) -> T:
        """Apply `read` to a body; on a thread if it is large, so that other requests need not wait."""
        return await asyncio.to_thread(read, body) if len(body) > self._limits.inline_bytes else read(body)

    async def _read(
        self, request: Request, limit: int, inflated_limit: int, advice: str, inflated_advice: str = UNCOMPRESSED
    ) -> bytes:
        length = request.headers.get("content-length", "0")
        if length.isascii() and length.isdigit() and int(length) > limit:
            raise MessageTooLargeError(int(length), limit, advice)
        received = request.state.memory = self._receive()
        pieces: list[bytes] = []
        more = True
        while more:
            piece, more = await self._next(request, received)
            received.hold(len(piece))
            if received.size > limit:
                raise MessageTooLargeError(None, limit, advice)
            pieces.append(piece)
        coding = request.headers.get("content-encoding", "")
        if received.size > LARGE_BYTES:
            body = await asyncio.to_thread(join_unlocked, pieces)
        else:
            body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if not coding:
            return body
        if len(body) <= SMALL_BYTES:
            body = decompressed(body, coding, inflated_limit, inflated_advice)
        else:
            body = await asyncio.to_thread(decompressed, body, coding, inflated_limit, inflated_advice)
        received.hold(len(body) - received.size)
        return body

    def _receive(self) -> RequestMemory:
        received = RequestMemory(self._budget)
        task = asyncio.current_task()
        if task is not None:
            task.add_done_callback(lambda _: received.share.close())
        return received

    async def _next(self, request: Request, received: RequestMemory) -> tuple[bytes, bool]:
        for limit_s in (self._limits.stall_s, MOMENT_S):
            with contextlib.suppress(TimeoutError):
                message = await received.within(limit_s, request.receive())
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                return message.get("body", b""), message.get("more_body", False)
            received.check()
        raise DeadlineExceededError("the rest of the request did not come; send it again")


def memory_held(request: Request) -> RequestMemory:
    """Return the memory of a request whose body has been received."""
    memory: RequestMemory = request.state.memory
    return memory


async def answered_or_gone(request: Request, answered: asyncio.Future[Any], cancel: Callable[[], None]) -> bool:
    """Wait for an answer, or until the client has closed the connection; the answer is then cancelled.

    Returns whether there is an answer; it may be an error, which is not raised here. `cancel` is called if there is none: the
    client has gone, or this wait is cancelled.
    """
    gone: asyncio.Future[None] = request.scope[CLIENT_GONE]
    try:
        await asyncio.wait((answered, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not answered.done():
            cancel()
            answered.cancel()
    return answered.done() and not answered.cancelled()  # a task that was cancelled just now is not done yet


def header_length(request: Request, body_bytes: int) -> int | None:
    """Return the number of JSON bytes at the body's start, from Inference-Header-Content-Length; None if all are.
    Raises InvalidArgumentError: the header is no number, or larger than the body.
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


def decompressed(body: bytes, coding: str, limit: int, advice: str = UNCOMPRESSED) -> bytes:
    """Decompress a request's body; the coding "" or "identity" is none. At most one byte over the limit is ever inflated.

    Raises:
        UnsupportedError: the coding is unknown.
        InvalidArgumentError: the body is not valid in this coding.
        MessageTooLargeError: the result would be over the limit; the text ends in `advice`.
    """
    coding = coding.strip().lower()
    if coding in {"", "identity"}:
        return body
    if coding not in WINDOW_BITS:
        raise UnsupportedError(f"Content-Encoding {coding!r} is not known here; expected gzip, deflate or none")
    return inflate(body, coding, limit, what="the body", advice=advice)


def accepted_coding(accept: str) -> str | None:
    """Return the known coding that a client prefers; None if it accepts none."""
    best, best_weight = None, 0.0
    for entry in accept.lower().split(","):
        name, _, parameter = entry.partition(";")
        weight = _weight(parameter)
        if name.strip() in WINDOW_BITS and weight > best_weight:
            best, best_weight = name.strip(), weight
    return best


def compressed(body: bytes, coding: str) -> bytes:
    return gzip.compress(body, LEVEL, mtime=0) if coding == "gzip" else zlib.compress(body, LEVEL)


def _weight(parameter: str) -> float:
    name, _, value = parameter.strip().partition("=")
    if name != "q":
        return 1.0
    try:
        return float(value)
    except ValueError:
        return 0.0
