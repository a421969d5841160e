"""Receive a request's body within its bounds, and notice when the client goes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from serve.engine.errors import DeadlineExceededError, InvalidArgumentError, MessageTooLargeError, UnavailableError
from serve.http.content_coding import decompressed
from serve.http.options import MOMENT_S, HttpLimits

T = TypeVar("T")
SMALL_BYTES = 1024  # even what inflates a thousandfold is quickly inflated


class _Held:
    """How many bytes are held for all requests, and how many may be."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size = 0


class _Share:
    """What is held for one request.

    Attributes:
        size: of it, in bytes.
    """

    def __init__(self, held: _Held) -> None:
        self._held = held
        self._is_first = not held.size  # whatever its size, it may be served
        self.size = 0

    def resize(self, size: int) -> None:
        """Hold so many bytes.

        Raises:
            UnavailableError: it is too much, with what is held for others.
        """
        self._held.size += size - self.size
        self.size = size
        if self._held.size > self._held.limit and not self._is_first:
            raise UnavailableError("the server is receiving as much as it can hold; retry with back-off")

    def free(self) -> None:
        """Hold nothing any more."""
        self._held.size -= self.size
        self.size = 0


class BodyReader:
    """Receives bodies; knows how much of all of them is held."""

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self._held = _Held(limits.max_held_bytes)

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

    async def understand(self, body: bytes, read: Callable[[bytes], T]) -> T:
        """What `read` makes of a body; on a thread where it is large, so that others need not wait."""
        return await asyncio.to_thread(read, body) if len(body) > self._limits.inline_bytes else read(body)

    async def _read(self, request: Request, limit: int, inflated_limit: int, advice: str) -> bytes:
        length = request.headers.get("content-length", "0")
        if length.isascii() and length.isdigit() and int(length) > limit:
            raise MessageTooLargeError(int(length), limit, advice)
        share = self._share()
        pieces: list[bytes] = []
        more = True
        while more:
            piece, more = await self._next(request)
            share.resize(share.size + len(piece))
            if share.size > limit:
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
        share.resize(len(body))
        return body

    def _share(self) -> _Share:
        share = _Share(self._held)
        task = asyncio.current_task()
        if task is not None:  # as it always is here
            task.add_done_callback(lambda _: share.free())
        return share

    async def _next(self, request: Request) -> tuple[bytes, bool]:
        message = await self._message(request)
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        return message.get("body", b""), message.get("more_body", False)

    async def _message(self, request: Request) -> Message:
        for limit_s in (self._limits.stall_s, MOMENT_S):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    return await request.receive()
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
