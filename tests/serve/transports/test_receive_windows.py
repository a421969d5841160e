from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from serve.transports.receive_windows import ReceiveWindows

MAX_HELD, WINDOW, FRAME = 100, 40, 30


class Client(RuleBasedStateMachine):
    """A client that sends messages in pieces on a few streams, as far as its windows allow."""

    def __init__(self) -> None:
        super().__init__()
        self.windows = ReceiveWindows(self.acknowledge, MAX_HELD)
        self.left: dict[int, int] = {}  # stream -> bytes of its message that are still to be sent
        self.held: dict[int, int] = {}  # stream -> bytes that the server holds
        self.window: Counter[int] = Counter()  # stream -> bytes that may be sent
        self.received = self.acknowledged = 0
        self.streams = 0

    def acknowledge(self, size: int, stream: int) -> None:
        assert size > 0
        self.acknowledged += size
        self.window[stream] += size

    @rule(length=st.integers(1, 400))
    def open(self, length: int) -> None:
        self.streams += 1
        self.left[self.streams], self.held[self.streams], self.window[self.streams] = length, 0, WINDOW

    @precondition(lambda self: any(self.window[s] > 0 for s in self.left))
    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        stream = data.draw(st.sampled_from([s for s in self.left if self.window[s] > 0]))
        self.send_some(stream, data.draw(st.integers(1, FRAME)))

    @precondition(lambda self: self.left)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        self.close(data.draw(st.sampled_from(sorted(self.left))))

    def send_some(self, stream: int, size: int) -> None:
        size = min(size, self.window[stream], self.left[stream])
        self.window[stream] -= size
        self.left[stream] -= size
        self.received += size
        if not self.left[stream]:
            self.windows.took(stream, size, size)
            self.close(stream)
            return
        self.held[stream] += size
        waits = self.windows.must_wait(stream, self.held[stream])
        self.windows.took(stream, size, 0 if waits else size)

    def close(self, stream: int) -> None:
        self.windows.answered(stream)
        self.windows.closed(stream)
        del self.left[stream], self.held[stream]

    @invariant()
    def nothing_is_acknowledged_twice(self) -> None:
        assert self.acknowledged <= self.received
        assert self.windows.held_bytes == sum(self.held.values())

    @invariant()
    def all_is_acknowledged_once_all_is_over(self) -> None:
        if not self.left:
            assert self.acknowledged == self.received

    @invariant()
    def what_is_held_is_bounded(self) -> None:
        """Over the bound, only the oldest message grows by more than the window that its stream had left."""
        oldest = next((s for s in self.held if self.held[s]), None)
        others = sum(held for stream, held in self.held.items() if stream != oldest)
        assert others <= MAX_HELD + (WINDOW + FRAME) * len(self.held)

    def teardown(self) -> None:
        """Whatever has been sent so far, all messages can become whole."""
        while self.left:
            able = [stream for stream in self.left if self.window[stream] > 0]
            assert able, "nobody may send"
            for stream in able:
                self.send_some(stream, FRAME)


TestReceiveWindows = Client.TestCase
TestReceiveWindows.settings = settings(max_examples=60, stateful_step_count=40)
