"""Which model may compute next, where several share the same cores: one model's flood must not starve another. Pure.

A slot is the right to run one batch. Each model's compute time is counted, divided by its weight; a free slot goes to whoever
has had the least of those that wait (start-time fair queueing, Goyal, Vin and Cheng 1996). A model that comes back after a
pause starts where the others are: what it did not use is not saved up. Of two models that both want all they can get, neither
gets ahead of the other by more than a batch of each a slot. No slot is idle while a model waits for one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class Share:
    """One model's part.

    Attributes:
        attained: seconds computed so far, divided by the weight; what runs counts with what the last batch took.
        waits: it wants a slot.
    """

    __slots__ = ("_charged", "_expected", "_slots", "_weight", "attained", "waits", "wake")

    def __init__(self, slots: ComputeSlots, wake: Callable[[], None], weight: float) -> None:
        self._slots = slots
        self._weight = weight
        self._expected = 0.0
        self.wake = wake
        self.attained = 0.0
        self._charged: deque[float] = deque()  # for what runs; which batch ends first does not matter to the sum
        self.waits = False

    @property
    def is_active(self) -> bool:
        """Whether it has a slot or wants one."""
        return self.waits or bool(self._charged)

    def claim(self) -> bool:
        """Take a slot for one batch. False when it is another's turn; `wake` is called when it has come."""
        return self._slots.claim(self)

    def give_back(self, seconds: float, *, wants_more: bool = False) -> None:
        """Give a slot back after a batch of `seconds`; `wants_more`: another batch waits."""
        self.attained += (seconds - self._charged.popleft()) / self._weight
        self._expected = seconds
        self._slots.give_back(self, wants_more=wants_more)

    def leave(self) -> None:
        """Want no slot any more."""
        self._slots.withdraw(self)

    def charge(self) -> None:
        """Count a batch that starts."""
        self.attained += self._expected / self._weight
        self._charged.append(self._expected)


class ComputeSlots:
    """Hands a number of slots to the models that join."""

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"there are {slots} compute slots, expected at least 1")
        self.free = slots
        self._waiting: list[Share] = []
        self._floor = 0.0  # what a model has attained, at least, that comes back

    def join(self, wake: Callable[[], None], weight: float = 1.0) -> Share:
        """A part for one more model.

        Args:
            wake: called when it is the model's turn, after it asked in vain; it should claim a slot at once, if it still wants
                one.
            weight: a model of weight 2 gets twice as much as one of weight 1, while both want more.
        """
        return Share(self, wake, weight)

    def claim(self, share: Share) -> bool:
        """See `Share.claim`."""
        if not (share.is_active):
            share.attained = max(share.attained, self._floor)
        if self.free and not any(other.attained < share.attained for other in self._waiting if other is not share):
            self.withdraw(share)
            self.free -= 1
            self._floor = max(self._floor, share.attained)
            share.charge()
            return True
        self._wait(share)
        return False

    def give_back(self, share: Share, *, wants_more: bool) -> None:
        """See `Share.give_back`."""
        self.free += 1
        if wants_more:
            self._wait(share)
        while self.free and self._waiting:
            turn = min(self._waiting, key=lambda waiting: waiting.attained)
            self.withdraw(turn)
            turn.wake()

    def withdraw(self, share: Share) -> None:
        """See `Share.leave`."""
        if share.waits:
            share.waits = False
            self._waiting.remove(share)

    def _wait(self, share: Share) -> None:
        if not share.waits:
            share.waits = True
            self._waiting.append(share)
