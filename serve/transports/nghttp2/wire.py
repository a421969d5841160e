"""The socket of one connection: written at the pace of its client, with a count of the responses that have not left."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

from ngh2 import Connection
from ngh2.exceptions import NGH2Error

from halfserve.serve.security.memory_budget import MemoryShare
from halfserve.serve.transports.nghttp2.frames import NO_ERROR

WRITE_BYTES: Final = 2**18  # per write: the rest stays in libnghttp2, where it can still be dropped
MIN_PROGRESS_BYTES: Final = 16_384  # a client must read so much within its time limit


class SessionOwner(ABC):
    """A connection, as its session sees it."""

    @abstractmethod
    def flush_soon(self, *, is_last: bool = False) -> None:
        """Have pending data written at the end of this loop iteration; at once if the last call in flight was answered."""

    @abstractmethod
    def go_away_soon(self, code: int = NO_ERROR) -> None:
        """Refuse new calls, with GOAWAY and an HTTP/2 error code, once the received bytes are read."""


class _LostConnection(SessionOwner):
    """Takes the place of a connection that has ended, so that it is freed although its calls may still be held."""

    def flush_soon(self, *, is_last: bool = False) -> None: ...
    def go_away_soon(self, code: int = NO_ERROR) -> None: ...


LOST: Final = _LostConnection()


def is_at_its_end(http2: Connection) -> bool:
    """Return whether libnghttp2 reads no more."""
    try:
        return not http2.want_read
    except NGH2Error:
        return True


class Wire:
    """The socket of one connection.

    Attributes:
        transport: asyncio's socket; None before the connection is made, and once it is lost.
        is_paused: nothing may be written: the socket's buffer is full, or the server's side has ended.
        has_left: the server's side has ended; the socket may stay open until the client has read the last bytes.
        ending: streams answered before the client ended, to be reset after the response.
        waiting: functions to call once a slow client has read the responses of a streaming call, by stream.
        unsent: bytes of responses that have not left; small responses are included after the next `count`.
    """

    __slots__ = (
        "_http2", "_last_words", "_max_unsent", "_share", "_to_read", "_unread_since_s", "ending", "has_left", "is_paused",
        "transport", "unsent", "waiting",
    )  # fmt: skip

    def __init__(
        self, http2: Connection, max_unsent_bytes: int, last_words: Callable[[bytes], bytes], share: MemoryShare
    ) -> None:
        """`last_words` maps the final bytes of a connection to the bytes to send; a client with `max_unsent_bytes` of one
        call is slow.
        """
        self._http2 = http2
        self._max_unsent = max_unsent_bytes
        self._last_words = last_words
        self._share = share
        self.transport: asyncio.Transport | None = None
        self.is_paused = self.has_left = False
        self.unsent = 0
        self._unread_since_s: float | None = None  # start of the current measurement of reading progress
        self._to_read = 0  # bytes left to read before the next measurement
        self.ending: set[int] = set()
        self.waiting: dict[int, Callable[[], None]] = {}

    @property
    def peer(self) -> str:
        """The client's address."""
        name = None if self.transport is None else self.transport.get_extra_info("peername")
        host, port = name[:2] if isinstance(name, tuple) else ("unix", 0)
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def has_unsent(self) -> bool:
        """Whether responses have not left yet."""
        if self.transport is None:
            return False
        if self.has_left:
            return self.transport.get_write_buffer_size() > 0
        return self.is_paused or self._http2.queued_body_size() > 0

    def write(self, transport: asyncio.Transport) -> bool:
        """Write libnghttp2's pending data until the socket is full; returns whether there was any.

        Raises:
            NGH2Error: the connection cannot go on.
        """
        wrote = False
        while True:
            while not self.is_paused and (data := self._http2.data_to_send(WRITE_BYTES)):
                transport.write(data if self._http2.want_read else self._last_words(data))
                wrote = True
            if self.is_paused or not self.ending or not self._reset_ended():
                break
        if self.waiting:
            self._wake()
        return wrote

    def is_behind(self, stream: int) -> bool:
        """Return whether the client reads a call's responses more slowly than they are produced."""
        queued = self._http2.queued_body_size(stream)
        return queued > self._max_unsent or (queued > 0 and self._share.is_short)

    def add(self, size: int) -> bool:
        """Count a response for libnghttp2 to send; False, uncounted, if memory does not hold it.

        The only response of a connection always fits.
        """
        self._share.add(size)
        if self.unsent and self._share.is_too_much:
            self._share.add(-size)
            return False
        self.unsent += size
        return True

    def count(self, transport: asyncio.Transport, now_s: float) -> None:
        """Update the count of unsent bytes; `now_s` is the time on the loop's clock."""
        unsent = self._http2.queued_body_size() + (transport.get_write_buffer_size() if self.is_paused else 0)
        left = self.unsent - unsent
        self._share.add(-left)
        self.unsent = unsent
        if not unsent:
            self._unread_since_s = None
            return
        self._to_read -= max(0, left)
        if self._unread_since_s is None or self._to_read <= 0:
            self._unread_since_s, self._to_read = now_s, MIN_PROGRESS_BYTES

    def is_unread_since(self, before_s: float) -> bool:
        """Return whether the client has read almost nothing since `before_s`, on the loop's clock."""
        return self._unread_since_s is not None and self._unread_since_s < before_s

    def when_read(self, stream: int, then: Callable[[], None]) -> None:
        """Call `then` once, when a slow client has caught up."""
        self.waiting[stream] = then

    def reset_when_out(self, stream: int) -> None:
        """Reset a stream once its response has left, because the client was still sending."""
        self.ending.add(stream)

    def closed(self, stream: int) -> None:
        self.ending.discard(stream)
        if self.waiting:
            self.waiting.pop(stream, None)

    def clear(self) -> None:
        """Drop the callbacks of a closed connection."""
        self.waiting.clear()

    def leave(self, transport: asyncio.Transport, *, has_said_so: bool) -> None:
        """End the server's side after the written data; after GOAWAY (`has_said_so`) the socket closes once the client does.

        A socket closed while the client still sends would answer with RST, and destroy responses that the client has not read.
        """
        if not has_said_so or not transport.can_write_eof():  # TLS itself waits for the client's close
            transport.close()
        elif not self.has_left:
            transport.write_eof()
        self.has_left = self.is_paused = True

    def _reset_ended(self) -> bool:
        """Reset streams whose response has left; libnghttp2 would drop a queued response."""
        out = [stream for stream in self.ending if not self._http2.queued_body_size(stream)]
        for stream in out:
            self.ending.discard(stream)
            with contextlib.suppress(NGH2Error):
                self._http2.reset_stream(stream, NO_ERROR)
        return bool(out)

    def _wake(self) -> None:
        for stream in [s for s in self.waiting if self._http2.queued_body_size(s) <= self._max_unsent // 2]:
            self.waiting.pop(stream)()
