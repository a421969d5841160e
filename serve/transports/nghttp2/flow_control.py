"""Flow control of one connection's requests: its receive windows.

HTTP/2 lets a client send as many bytes as its window has, and acknowledging bytes opens the window again. A message is read
only when complete, so its bytes are acknowledged as they arrive, unless the unfinished messages hold too much, on this
connection or on all of them. Then only the oldest message continues until it is complete: at once if the connection alone is
over its limit, in its turn if all connections are (see `MemoryBudget`).

The connection's window must stay open while streams are blocked. libnghttp2 opens a window when half of it has been
acknowledged; the window is widened when the withheld bytes come near half of it.
"""

from __future__ import annotations

import contextlib
from typing import Final

from ngh2 import Connection
from ngh2.exceptions import ConnectionClosingError, ConnectionStateError

from halfserve.serve.security.memory_budget import MemoryShare
from halfserve.serve.transports.nghttp2.fairness import TransportLimits
from halfserve.serve.transports.nghttp2.frames import DEFAULT_WINDOW_BYTES

AT_ITS_END: Final = (ConnectionStateError, ConnectionClosingError)  # raised by libnghttp2 after a connection's end
REFUSED_WINDOWS: Final = 16  # stream windows beyond `max_held_bytes`, after which younger messages are refused
NEAR_HALF: Final = 3 / 8
WIDER: Final = 4  # times the withheld bytes
MAX_WINDOW_BYTES: Final = 2**31 - 1


class ReceiveWindows:
    """Receive windows of one connection, and its bytes held in memory.

    Attributes:
        unacknowledged: bytes taken and not acknowledged: they withhold a part of the connection's window.
        acknowledge_at: number of received bytes at which the connection's window is reopened.
        answering: bytes held until a stream is answered, where they are worth counting.
    """

    def __init__(self, http2: Connection, limits: TransportLimits, share: MemoryShare) -> None:
        self._http2 = http2
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
        with contextlib.suppress(*AT_ITS_END):
            self._http2.set_local_window_size(window)

    def _acknowledge(self, size: int, stream: int) -> None:
        """Reopen a stream's window by `size` bytes, at least 1.

        After the connection's end it does nothing: timers, models and tasks go on for a while.
        """
        with contextlib.suppress(*AT_ITS_END):
            self._http2.acknowledge_received_data(size, stream)
