"""Flow control of one connection: receive windows, and responses that have not left.

HTTP/2 lets a client send as many bytes as its window has, and acknowledging bytes opens the window again. A message is read
only when complete, so its bytes are acknowledged as they arrive, unless the unfinished messages hold too much, on this
connection or on all of them. Then only the oldest message continues until it is complete: at once if the connection alone is
over its limit, in its turn if all connections are (see `MemoryBudget`).

The connection's window must stay open while streams are blocked. libnghttp2 opens a window when half of it has been
acknowledged; the window is widened when the withheld bytes come near half of it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from ngh2 import Connection
from ngh2.exceptions import NGH2Error

from halfserve.serve.security.memory_budget import MemoryShare
from halfserve.serve.transports.nghttp2.fairness import TransportLimits
from halfserve.serve.transports.nghttp2.frames import DEFAULT_WINDOW_BYTES

Acknowledge = Callable[[int, int], None]
Widen = Callable[[int], None]

REFUSED_WINDOWS: Final = 16  # stream windows beyond `max_held_bytes`, after which younger messages are refused
NEAR_HALF: Final = 3 / 8
WIDER: Final = 4  # times the withheld bytes
MAX_WINDOW_BYTES: Final = 2**31 - 1
WRITE_BYTES: Final = 2**18  # per write: the rest stays in libnghttp2, where it can still be dropped
MIN_PROGRESS_BYTES: Final = 16_384  # a client must read so much within its time limit
NO_ERROR: Final = 0x00


class ReceiveWindows:
    """Receive windows of one connection, and its bytes held in memory.

    Attributes:
        unacknowledged: bytes taken and not acknowledged: they withhold a part of the connection's window.
        acknowledge_at: number of received bytes at which the connection's window is reopened.
        answering: bytes held until a stream is answered, where they are worth counting.
    """

    def __init__(self, acknowledge: Acknowledge, widen: Widen, limits: TransportLimits, share: MemoryShare) -> None:
        """`acknowledge` reopens a stream's window by a number of bytes, at least 1; `widen` sets the size of the
        connection's window.
        """
        self._acknowledge = acknowledge
        self._widen = widen
        self._share = share
        self._max_held = limits.max_held_bytes
        self._most = self._max_held + REFUSED_WINDOWS * limits.stream_window_bytes
        self._window = self._usual = DEFAULT_WINDOW_BYTES
        self._widest = min(limits.connection_window_bytes + 2 * self._most, MAX_WINDOW_BYTES)
        self._withheld: dict[int, int] = {}  # stream -> bytes taken and not acknowledged
        self.unacknowledged = 0
        self.acknowledge_at = self._usual // 4
        self._unfinished: dict[int, int] = {}  # stream -> bytes held of its unfinished message, the oldest first
        self._held = 0  # the sum of these
        self.answering: dict[int, int] = {}

    @property
    def unfinished(self) -> list[int]:
        """Streams with an unfinished message, oldest first."""
        return list(self._unfinished)

    def is_oldest(self, stream: int) -> bool:
        """Return whether a stream has the oldest unfinished message."""
        return stream == next(iter(self._unfinished), None)

    @property
    def is_held_up(self) -> bool:
        """Whether the client should send nothing but its oldest message."""
        return self._share.is_held_up

    def took(self, stream: int, size: int, free: int) -> None:
        """Count `size` bytes received on a stream and acknowledge `free` of them."""
        if free:
            self._acknowledge(free, stream)
        if free != size:
            self._withheld[stream] = self._withheld.get(stream, 0) + size - free
            self.unacknowledged += size - free
            self._keep_open()

    @property
    def is_too_much(self) -> bool:
        """Whether unfinished messages hold so much that all but the oldest must be refused."""
        return self._held > self._most or self._share.is_too_much

    def open(self, window: int) -> None:
        """Set the connection's usual window to `window` bytes."""
        was_usual, self._usual = self._window == self._usual, window
        self.acknowledge_at = window // 4
        if was_usual and self._window != window:
            self._fit(window)

    def must_wait(self, stream: int, held: int) -> bool:
        """Return whether a stream that holds `held` bytes of an unfinished message must pause."""
        self._count(held - self._unfinished.get(stream, 0))
        if held:
            self._unfinished[stream] = held
            if self._held <= self._max_held and not self._share.is_short:
                return False
            return stream != next(iter(self._unfinished)) or not self._share.goes_on()
        if self._unfinished.pop(stream, 0):
            self._share.step_back()
            self._resume(stream)  # its next message needs the withheld window
            self.resume_oldest()
        return False

    def answer_later(self, stream: int, size: int, *, is_last: bool) -> None:
        """Count `size` bytes for a stream until its response; `is_last`: its request is complete."""
        held = self._unfinished.pop(stream, 0) if is_last and self._unfinished else 0
        self._held -= held
        self._share.add(size - held - self.answering.get(stream, 0))
        self.answering[stream] = size
        if held:
            self._share.step_back()
            self.resume_oldest()

    def give_back(self, stream: int, size: int) -> bool:
        """Acknowledge up to `size` withheld bytes of a stream; False if none are withheld."""
        withheld = self._withheld.get(stream, 0)
        size = min(size, withheld)
        if size <= 0:
            return False
        self._withheld[stream] = withheld - size
        self._release(size, stream)
        return True

    def answered(self, stream: int) -> None:
        """Release a stream's message, so that the oldest remaining one can continue."""
        if self.answering and stream in self.answering:
            self._share.add(-self.answering.pop(stream))
        held = self._unfinished.pop(stream, 0) if self._unfinished else 0
        if held:
            self._count(-held)
            self._share.step_back()
            self.resume_oldest()

    def closed(self, stream: int) -> None:
        """Release a closed stream; its withheld bytes still count against the connection's window."""
        self.answered(stream)
        withheld = self._withheld.pop(stream, 0) if self._withheld else 0
        if withheld:
            self._release(withheld, stream)

    def resume_oldest(self) -> None:
        """Let the oldest unfinished message continue if it is this connection's turn."""
        oldest = next(iter(self._unfinished), None)
        if oldest is None:
            self._share.step_back()
        elif self._share.goes_on():
            self._resume(oldest)
            self._keep_open()

    def _keep_open(self) -> None:
        """Widen the connection's window before withheld bytes close it, unless all messages must pause."""
        if self.unacknowledged > NEAR_HALF * self._window and not self._share.is_held_up:
            self._fit(min(WIDER * self.unacknowledged, self._widest))

    def _count(self, more: int) -> None:
        self._held += more
        self._share.add(more)

    def _resume(self, stream: int) -> None:
        self.give_back(stream, self._withheld.get(stream, 0))

    def _release(self, size: int, stream: int) -> None:
        self.unacknowledged -= size
        self._acknowledge(size, stream)
        if not self.unacknowledged and self._window != self._usual:
            self._fit(self._usual)

    def _fit(self, window: int) -> None:
        self._window = window
        self._widen(window)


class SendBuffer:
    """Writes at the pace of the client, and counts what has not left."""

    __slots__ = (
        "_http2", "_last_words", "_max_unsent", "_share", "_to_read", "_unread_since_s", "ending", "paused", "unsent",
        "waiting",
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
        self.unsent = 0  # bytes of responses that have not left; small responses are included after the next `count`
        self._unread_since_s: float | None = None  # start of the current measurement of reading progress
        self._to_read = 0  # bytes left to read before the next measurement
        self.ending: set[int] = set()  # answered before the client ended: reset after the response
        self.waiting: dict[int, Callable[[], None]] = {}  # streaming calls with a slow client
        self.paused = False  # the socket's buffer is full

    def write(self, transport: asyncio.Transport) -> bool:
        """Write pending data until the socket is full; returns whether there was any.

        Raises:
            NGH2Error: the connection cannot go on.
        """
        wrote = False
        while True:
            while not self.paused and (data := self._http2.data_to_send(WRITE_BYTES)):
                transport.write(data if self._http2.want_read else self._last_words(data))
                wrote = True
            if self.paused or not self.ending or not self._reset_ended():
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

    def count(self, buffered: int, now_s: float) -> None:
        """Update the count of unsent bytes.

        Args:
            buffered: bytes in the socket's own buffer.
            now_s: current time on the loop's clock.
        """
        unsent = self._http2.queued_body_size() + buffered
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
