from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from serve.security.memory_budget import DEFAULT_BYTES, MemoryBudget
from serve.transports.limits import TransportLimits
from serve.transports.nghttp2.receive_windows import REFUSED_WINDOWS, ReceiveWindows

MAX_HELD, WINDOW, CONNECTION_WINDOW, FRAME = 100, 40, 80, 30
LENGTHS = st.integers(1, 400)  # of messages
LIMITS = TransportLimits(max_held_bytes=MAX_HELD, stream_window_bytes=WINDOW, connection_window_bytes=CONNECTION_WINDOW)


class Client(RuleBasedStateMachine):
    """A client that sends messages in pieces on many streams, as far as its windows allow.

    The windows behave as libnghttp2's: they are opened when half of them has been acknowledged, or made wider at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.windows = ReceiveWindows(self.acknowledge, self.widen, LIMITS, MemoryBudget(DEFAULT_BYTES).share(is_known=True))
        self.width = self.may_send = 65_535
        self.not_told = 0
        self.windows.open(CONNECTION_WINDOW)
        self.left: dict[int, int] = {}  # stream -> bytes of its message that are still to be sent
        self.more: dict[int, list[int]] = {}  # stream -> lengths of the messages after that
        self.held: dict[int, int] = {}  # stream -> bytes that the server holds
        self.window: Counter[int] = Counter()  # stream -> bytes that may be sent
        self.not_told_of: Counter[int] = Counter()  # stream -> acknowledged bytes that the client does not know of
        self.not_told = 0  # acknowledged bytes that the client does not know of
        self.received = self.acknowledged = 0
        self.streams = 0

    def acknowledge(self, size: int, stream: int) -> None:
        assert size > 0
        self.acknowledged += size
        self.not_told_of[stream] += size
        if self.not_told_of[stream] >= WINDOW / 2:
            self.window[stream] += self.not_told_of.pop(stream)
        self.not_told += size
        self.tell()

    def widen(self, width: int) -> None:
        self.may_send += width - self.width
        self.width = width
        self.tell()

    def tell(self) -> None:
        if self.not_told >= self.width / 2:
            self.may_send += self.not_told
            self.not_told = 0

    def able(self) -> list[int]:
        """The streams that may send now."""
        return [stream for stream in self.left if self.window[stream] > 0] if self.may_send > 0 else []

    @rule(length=LENGTHS, more=st.lists(LENGTHS, max_size=3))
    def open(self, length: int, more: list[int]) -> None:
        self.streams += 1
        self.left[self.streams], self.held[self.streams], self.window[self.streams] = length, 0, WINDOW
        self.more[self.streams] = more

    @precondition(lambda self: self.able())
    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        self.send_some(data.draw(st.sampled_from(self.able())), data.draw(st.integers(1, FRAME)))

    @precondition(lambda self: self.able())
    @rule()
    def send_all_that_may_be_sent(self) -> None:
        """Those that came last first: so that the oldest is not the one that always goes on."""
        while able := [stream for stream in self.able() if stream != min(self.left)]:
            self.send_some(able[-1], FRAME)

    @precondition(lambda self: self.left)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        self.close(data.draw(st.sampled_from(sorted(self.left))))

    def send_some(self, stream: int, size: int) -> None:
        size = min(size, self.window[stream], self.left[stream], self.may_send)
        self.window[stream] -= size
        self.may_send -= size
        self.left[stream] -= size
        self.received += size
        if not self.left[stream]:
            self.finish(stream, size)
            return
        self.held[stream] += size
        waits = self.windows.must_wait(stream, self.held[stream])
        if waits and self.windows.is_too_much:
            self.windows.answered(stream)
            self.windows.took(stream, size, size)
            self.close(stream)
        else:
            self.windows.took(stream, size, 0 if waits else size)

    def finish(self, stream: int, size: int) -> None:
        """The last bytes of a message have come."""
        if not self.more[stream]:
            self.windows.took(stream, size, size)
            self.close(stream)
            return
        self.left[stream], self.held[stream] = self.more[stream].pop(), 0
        assert not self.windows.must_wait(stream, 0)
        self.windows.took(stream, size, size)

    def close(self, stream: int) -> None:
        self.windows.answered(stream)
        self.windows.closed(stream)
        del self.left[stream], self.held[stream]

    @invariant()
    def nothing_is_acknowledged_twice(self) -> None:
        assert self.acknowledged <= self.received
        assert self.windows._held == sum(self.held.values())

    @invariant()
    def all_is_as_it_was_once_all_is_over(self) -> None:
        if not self.left:
            assert self.acknowledged == self.received
            assert self.width == CONNECTION_WINDOW

    @invariant()
    def what_is_held_is_bounded(self) -> None:
        """Over the bound, only the oldest message grows by more than the window that its stream had left."""
        oldest = next((s for s in self.held if self.held[s]), None)
        others = sum(held for stream, held in self.held.items() if stream != oldest)
        assert others <= min(MAX_HELD + (WINDOW + FRAME) * len(self.held), MAX_HELD + REFUSED_WINDOWS * WINDOW + FRAME)

    def teardown(self) -> None:
        """Whatever has been sent so far, all messages that are not refused can become whole."""
        while self.left:
            able = self.able()
            assert able, "nobody may send"
            for stream in reversed(able):
                if stream in self.left and self.may_send > 0:
                    self.send_some(stream, FRAME)


TestReceiveWindows = Client.TestCase
TestReceiveWindows.settings = settings(max_examples=100, stateful_step_count=50)
