"""How much a client may send on one connection: what unfinished messages hold back, and who may go on. Pure.

HTTP/2 lets a client send as many bytes as its window has, and each byte that is acknowledged opens the window again. A message
must be whole before it can be read, so all of its bytes are acknowledged as they come: unless the messages in progress hold too
much in all, on this connection or on all of them. Then only the oldest of them goes on, until it is whole: at once where the
connection alone holds too much, in its turn where all of them do (see `MemoryBudget`).

For that the connection's window must stay open while those of other streams are shut. libnghttp2 opens a window again when half
of it has been acknowledged, so that it is made wider when what is withheld comes near to half of it.
"""

from __future__ import annotations

from collections.abc import Callable

from serve.security.memory_budget import Share
from serve.transports.limits import TransportLimits
from serve.transports.nghttp2.frames import DEFAULT_WINDOW_BYTES

Acknowledge = Callable[[int, int], None]
Widen = Callable[[int], None]

REFUSED_WINDOWS = 16  # of streams, beyond what may be held: with so many more bytes the younger messages are refused
NEAR_HALF = 3 / 8
WIDER = 4  # times what is withheld
MAX_WINDOW_BYTES = 2**31 - 1


class ReceiveWindows:
    """The bookkeeping of one connection.

    Attributes:
        answering: bytes held until a stream is answered, where they are worth counting.
    """

    def __init__(self, acknowledge: Acknowledge, widen: Widen, limits: TransportLimits, share: Share) -> None:
        """Nothing received yet; the connection has the window that HTTP/2 begins with.

        Args:
            acknowledge: takes a number of bytes, at least 1, and a stream: the client may send as many again on it.
            widen: takes how wide the connection's window is to be from now on.
            limits: of the connection.
            share: of the memory that all connections may take; what is held is counted there.
        """
        self._acknowledge = acknowledge
        self._widen = widen
        self._share = share
        self._max_held = limits.max_held_bytes
        self._most = self._max_held + REFUSED_WINDOWS * limits.stream_window_bytes
        self._window = self._usual = DEFAULT_WINDOW_BYTES
        self._widest = min(limits.connection_window_bytes + 2 * self._most, MAX_WINDOW_BYTES)
        self._withheld: dict[int, int] = {}  # stream -> bytes taken and not yet acknowledged
        self._unacknowledged = 0  # the sum of these
        self._unfinished: dict[int, int] = {}  # stream -> bytes held of its unfinished message, the oldest first
        self._held = 0  # the sum of these
        self.answering: dict[int, int] = {}

    @property
    def unfinished(self) -> list[int]:
        """Streams with an unfinished message, the oldest first."""
        return list(self._unfinished)

    def is_oldest(self, stream: int) -> bool:
        """Whether a stream's message is the one that goes on, where one does."""
        return stream == next(iter(self._unfinished), None)

    @property
    def is_held_up(self) -> bool:
        """Whether the client is to send nothing more for now, unless its oldest message needs it."""
        return self._share.is_held_up

    @property
    def acknowledge_at(self) -> int:
        """Received bytes with which the client is told that it may send as many again."""
        return self._usual // 4

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
            self._keep_open()

    @property
    def is_too_much(self) -> bool:
        """Whether unfinished messages hold so much that those which must wait are to be refused."""
        return self._held > self._most or self._share.is_too_much

    def open(self, window: int) -> None:
        """Let the client send so many bytes before any are acknowledged, from now on."""
        was_usual, self._usual = self._window == self._usual, window
        if was_usual and self._window != window:
            self._fit(window)

    def must_wait(self, stream: int, held: int) -> bool:
        """Whether a stream that now holds `held` bytes of an unfinished message may not send more for now."""
        self._count(held - self._unfinished.get(stream, 0))
        if held:
            self._unfinished[stream] = held
            if self._held <= self._max_held and not self._share.is_short:
                return False
            return stream != next(iter(self._unfinished)) or not self._share.goes_on()
        if self._unfinished.pop(stream, 0):
            self._share.step_back()
            self._let_go_on(stream)  # its next message needs the window that this one could do without
            self.let_oldest_go_on()
        return False

    def answer_later(self, stream: int, size: int, *, is_last: bool) -> None:
        """A stream holds so many bytes until it is answered, or until others are named; `is_last`: no more will come on it."""
        held = self._unfinished.pop(stream, 0) if is_last and self._unfinished else 0
        self._held -= held
        self._share.add(size - held - self.answering.get(stream, 0))
        self.answering[stream] = size
        if held:
            self._share.step_back()
            self.let_oldest_go_on()

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
        if self.answering and stream in self.answering:
            self._share.add(-self.answering.pop(stream))
        held = self._unfinished.pop(stream, 0) if self._unfinished else 0
        if held:
            self._count(-held)
            self._share.step_back()
            self.let_oldest_go_on()

    def closed(self, stream: int) -> None:
        """A stream is over: what was withheld of it still counts against the connection's window, and is given back."""
        self.answered(stream)
        withheld = self._withheld.pop(stream, 0) if self._withheld else 0
        if withheld:
            self._release(withheld, stream)

    def let_oldest_go_on(self) -> None:
        """The oldest unfinished message may go on, if it is this connection's turn."""
        oldest = next(iter(self._unfinished), None)
        if oldest is None:
            self._share.step_back()
        elif self._share.goes_on():
            self._let_go_on(oldest)
            self._keep_open()

    def _keep_open(self) -> None:
        """Widen the connection's window where what is withheld would shut it, unless all of it is to wait."""
        if self._unacknowledged > NEAR_HALF * self._window and not self._share.is_held_up:
            self._fit(min(WIDER * self._unacknowledged, self._widest))

    def _count(self, more: int) -> None:
        self._held += more
        self._share.add(more)

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
