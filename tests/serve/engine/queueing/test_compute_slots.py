from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfserve.serve.engine.queueing.compute_slots import ComputeShare, ComputeSlots


class Competitor:
    """A model with batches to run, given their seconds."""

    def __init__(self, machine: Machine, costs: Sequence[float], weight: float) -> None:
        self.machine = machine
        self.costs = list(costs)
        self.weight = weight
        self.computed = 0.0
        self.share: ComputeShare = machine.slots.join(self.start, weight)

    def start(self) -> None:
        while self.costs and self.share.claim():
            self.machine.run(self, self.costs.pop(0))


class Machine:
    """Runs batches in slots, on a virtual clock."""

    def __init__(self, slots: int) -> None:
        self.slots = ComputeSlots(slots)
        self.size = slots
        self.now = 0.0
        self._running: list[tuple[float, int, Competitor, float]] = []
        self._order = itertools.count()

    def run(self, who: Competitor, cost: float) -> None:
        heapq.heappush(self._running, (self.now + cost, next(self._order), who, cost))
        assert len(self._running) <= self.size, "no more at once than there are slots"

    def step(self) -> bool:
        if not self._running:
            return False
        self.now, _, who, cost = heapq.heappop(self._running)
        who.computed += cost
        who.share.give_back(cost, wants_more=bool(who.costs))
        return True

    def busy(self) -> int:
        return len(self._running)


costs = st.lists(st.integers(1, 50).map(lambda n: n / 1000), min_size=1, max_size=60)


@given(st.lists(st.tuples(costs, st.sampled_from([0.5, 1.0, 2.0])), min_size=1, max_size=4), st.integers(1, 3))
def test_slots_are_work_conserving_and_fair(models: list[tuple[list[float], float]], slots: int) -> None:
    machine = Machine(slots)
    all_ = [Competitor(machine, batches, weight) for batches, weight in models]
    # What may run before a batch's cost is known, and what the last guess was wrong by.
    longest = {who: max(who.costs) / who.weight for who in all_}
    for who in all_:
        who.start()
    while machine.step():
        waiting = [who for who in all_ if who.costs]
        assert not waiting or machine.busy() == slots, "a slot idles while a model waits"
        for one, other in itertools.combinations(waiting, 2):
            ahead = abs(one.computed / one.weight - other.computed / other.weight)
            assert ahead <= 3 * (slots + 1) * (longest[one] + longest[other])
    assert all(who.computed == pytest.approx(sum(batches)) for who, (batches, _) in zip(all_, models, strict=True))
    assert machine.slots.free == slots


def test_two_floods_share_by_their_weights() -> None:
    machine = Machine(1)
    light, heavy = Competitor(machine, [0.001] * 3000, 1.0), Competitor(machine, [0.010] * 3000, 2.0)
    light.start()
    heavy.start()
    while machine.now < 1.0:
        machine.step()
    assert heavy.computed / light.computed == pytest.approx(2.0, rel=0.05)


def test_a_model_back_from_a_pause_is_next_but_has_no_credit() -> None:
    machine = Machine(1)
    flood = Competitor(machine, [0.01] * 1000, 1.0)
    flood.start()
    while machine.now < 1.0:
        machine.step()
    guest = Competitor(machine, [0.01] * 100, 1.0)
    guest.start()
    machine.step()
    machine.step()
    assert guest.computed > 0, "it waits for no more than the batch that runs"
    while len(guest.costs) > 50:
        machine.step()
    assert flood.computed - 1.0 == pytest.approx(guest.computed, abs=0.03)


def test_a_model_that_leaves_gets_no_slot() -> None:
    machine = Machine(1)
    first, second, third = (Competitor(machine, [0.01], 1.0) for _ in range(3))
    for who in (first, second, third):
        who.start()
    second.share.leave()
    machine.step()
    assert (len(second.costs), len(third.costs)) == (1, 0)


def test_a_turn_that_is_not_taken_goes_to_the_next() -> None:
    machine = Machine(1)
    first, second, third = (Competitor(machine, [0.01], 1.0) for _ in range(3))
    for who in (first, second, third):
        who.start()
    second.costs.clear()  # its requests were cancelled
    machine.step()
    assert machine.busy() == 1
    assert not third.costs


def test_there_is_at_least_one_slot() -> None:
    with pytest.raises(ValueError, match="there are 0 compute slots, expected at least 1"):
        ComputeSlots(0)
