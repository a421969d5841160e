"""How much a client may send on one connection: what unfinished messages hold back, and who may go on. Pure.

HTTP/2 lets a client send as many bytes as its window has, and each byte that is acknowledged opens the window again. A message
must be whole before it can be read, so all of its bytes are acknowledged as they come: unless the messages in progress hold too
much in all. Then only the oldest of them goes on, which it can always do, until it is whole.

For that the connection's window must stay open while those of other streams are shut. libnghttp2 opens a window again when half
of it has been acknowledged, so that it is made wider when what is withheld comes near to half of it.
"""

from __future__ import annotations

from collections.abc import Callable

from serve.transports.limits import TransportLimits

Acknowledge = Callable[[int, int], None]
Widen = Callable[[int], None]

REFUSED_WINDOWS = 16  # of streams, beyond what may be held: with so many more bytes the younger messages are refused
NEAR_HALF = 3 / 8
WIDER = 4  # times what is withheld
MAX_WINDOW_BYTES = 2**31 - 1


class ReceiveWindows:
    """The bookkeeping of one connection."""

    def __init__(self, acknowledge: Acknowledge, widen: Widen, limits: TransportLimits) -> None:
        """Nothing received yet.

        Args:
            acknowledge: takes a number of bytes, at least 1, and a stream: the client may send as many again on it.
            widen: takes how wide the connection's window is to be from now on.
            limits: of the connection.
        """
        self._acknowledge = acknowledge
        self._widen = widen
        self._max_held = limits.max_held_bytes
        self._most = self._max_held + REFUSED_WINDOWS * limits.stream_window_bytes
        self._window = self._usual = limits.connection_window_bytes
        self._widest = min(self._usual + 2 * self._most, MAX_WINDOW_BYTES)
        self._withheld: dict[int, int] = {}  # stream -> bytes taken and not yet acknowledged
        self._unacknowledged = 0  # the sum of these
        self._unfinished: dict[int, int] = {}  # stream -> bytes held of its unfinished message, the oldest first
        self._held = 0  # the sum of these

    @property
    def withhold(self) -> bool:
        """Whether some of the connection's window is kept from the client."""
        return self._unacknowledged > 0

    def took(self, stream: int, size: int, free: int) -> None:
        """`size` bytes came on a stream; `free` of them may be sent again at once."""
        if free:
            self._acknowledge(free, stream)
        if free != size:
            self._withheld[stream] = self._withheld.get(stream, 0) + size - free
            self._unacknowledged += size - free
            if self._unacknowledged > NEAR_HALF * self._window:
                self._fit(min(WIDER * self._unacknowledged, self._widest))

    @property
    def is_too_much(self) -> bool:
        """Whether unfinished messages hold so much that those which must wait are to be refused."""
        return self._held > self._most

    def must_wait(self, stream: int, held: int) -> bool:
        """Whether a stream that now holds `held` bytes of an unfinished message may not send more for now."""
        self._held += held - self._unfinished.get(stream, 0)
        if held:
            self._unfinished[stream] = held
            return self._held > self._max_held and stream != next(iter(self._unfinished))
        if self._unfinished.pop(stream, 0):
            self._let_go_on(stream)  # its next message needs the window that this one could do without
            self._let_oldest_go_on()
        return False

    def give_back(self, stream: int, size: int) -> bool:
        """Up to `size` withheld bytes of a stream may be sent again; False where none are withheld."""
        withheld = self._withheld.get(stream, 0)
        size = min(size, withheld)
        if size <= 0:
            return False
        self._withheld[stream] = withheld - size
        self._release(size, stream)
        return True

    def answered(self, stream: int) -> None:
        """A stream's message is no longer in progress: the oldest of the others may go on."""
        held = self._unfinished.pop(stream, 0) if self._unfinished else 0
        if held:
            self._held -= held
            self._let_oldest_go_on()

    def closed(self, stream: int) -> None:
        """A stream is over: what was withheld of it still counts against the connection's window, and is given back."""
        self.answered(stream)
        withheld = self._withheld.pop(stream, 0) if self._withheld else 0
        if withheld:
            self._release(withheld, stream)

    def _let_oldest_go_on(self) -> None:
        oldest = next(iter(self._unfinished), None)
        if oldest is not None:
            self._let_go_on(oldest)

    def _let_go_on(self, stream: int) -> None:
        self.give_back(stream, self._withheld.get(stream, 0))

    def _release(self, size: int, stream: int) -> None:
        self._unacknowledged -= size
        self._acknowledge(size, stream)
        if not self._unacknowledged and self._window != self._usual:
            self._fit(self._usual)

    def _fit(self, window: int) -> None:
        self._window = window
        self._widen(window)
