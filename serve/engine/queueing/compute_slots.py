"""Shares the CPU cores fairly between models: decides which model may compute its next batch. Pure.

A slot is the right to run one batch. Each model's compute time, divided by its weight, is counted; a free slot goes to the
waiting model with the least (start-time fair queueing, Goyal, Vin and Cheng 1996). A model that returns after a pause starts
level with the others: unused time is not saved up. Of two models that are always busy, neither gets ahead of the other by more
than one batch per slot. No slot is idle while a model waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class ComputeShare:
    """One model's share of the slots.

    Attributes:
        attained: seconds computed so far, divided by the weight; a running batch counts with the time of the previous one.
        waits: whether it wants a slot.
        wake: called when it is the model's turn.
    """

    __slots__ = ("_charged", "_expected", "_slots", "_weight", "attained", "waits", "wake")

    def __init__(self, slots: ComputeSlots, wake: Callable[[], None], weight: float) -> None:
        self._slots = slots
        self._weight = weight
        self._expected = 0.0
        self.wake = wake
        self.attained = 0.0
        self._charged: deque[float] = deque()  # seconds charged per running batch; the order does not affect the sum
        self.waits = False

    @property
    def is_active(self) -> bool:
        """Whether it has a slot or wants one."""
        return self.waits or bool(self._charged)

    def claim(self) -> bool:
        """Take a slot for one batch. Returns False if it is another model's turn; `wake` is called once it is this model's."""
        return self._slots.claim(self)

    def give_back(self, seconds: float, *, wants_more: bool = False) -> None:
        """Return a slot after a batch of `seconds`; `wants_more`: whether another batch waits."""
        self.attained += (seconds - self._charged.popleft()) / self._weight
        self._expected = seconds
        self._slots.give_back(self, wants_more=wants_more)

    def leave(self) -> None:
        """Withdraw a waiting claim."""
        self._slots.withdraw(self)

    def charge(self) -> None:
        """Charge a batch that starts."""
        self.attained += self._expected / self._weight
        self._charged.append(self._expected)


class ComputeSlots:
    """Gives a number of slots to the models that join."""

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"there are {slots} compute slots, expected at least 1")
        self.free = slots
        self._waiting: list[ComputeShare] = []
        self._floor = 0.0  # least `attained` of a model that returns after a pause

    def join(self, wake: Callable[[], None], weight: float = 1.0) -> ComputeShare:
        """Add a model. One of `weight` 2 gets twice the time of one of weight 1, as long as both are busy.

        `wake`: called when it is the model's turn, after a refused claim; it should claim a slot at once, if it wants one.
        """
        return ComputeShare(self, wake, weight)

    def claim(self, share: ComputeShare) -> bool:
        if not share.is_active:
            share.attained = max(share.attained, self._floor)
        if self.free and not any(other.attained < share.attained for other in self._waiting if other is not share):
            self.withdraw(share)
            self.free -= 1
            self._floor = max(self._floor, share.attained)
            share.charge()
            return True
        self._wait(share)
        return False

    def give_back(self, share: ComputeShare, *, wants_more: bool) -> None:
        self.free += 1
        if wants_more:
            self._wait(share)
        while self.free and self._waiting:
            turn = min(self._waiting, key=lambda waiting: waiting.attained)
            self.withdraw(turn)
            turn.wake()

    def withdraw(self, share: ComputeShare) -> None:
        if share.waits:
            share.waits = False
            self._waiting.remove(share)

    def _wait(self, share: ComputeShare) -> None:
        if not share.waits:
            share.waits = True
            self._waiting.append(share)
