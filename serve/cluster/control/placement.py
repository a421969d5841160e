"""Which members serve which models. Pure: measured load and what is served now go in, who shall serve what comes out.

Each model has one copy at least, and more by its demand: the next copy goes to the model with the most demand per copy
(D'Hondt's method of highest averages), as long as a copy has enough to do. What is there stays where it is unless something
else is clearly better, as each move costs a load.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

HOLD = 2.0  # a copy that exists counts this many times as much as a new one
WORTH = 0.05  # batches that compute at once, per copy: less is not worth another copy
WORTH_SECOND = 0.001  # but a second one, as a model that is used shall outlive a member
UNEVEN = 1.5  # times the mean load of members: above, a model moves from the busiest
MOVES = 2  # for even loads, in one decision

Placement = dict[str, frozenset[str]]  # the members of each model


@dataclass(frozen=True, kw_only=True)
class ModelDemand:
    """A model that shall be served.

    Attributes:
        name: of the model.
        demand: batches that compute at once in the whole cluster, on average.
        size: bytes of memory at each member; 0 if that is not known.
    """

    name: str
    demand: float = 0.0
    size: int = 0


@dataclass(frozen=True, kw_only=True)
class MemberRoom:
    """A member that may serve models.

    Attributes:
        id: of the member.
        memory_size: bytes that models may take; 0 if that is not known.
        serves: models that it has now, or is loading.
        refuses: models that it could not load.
    """

    id: str
    memory_size: int = 0
    serves: frozenset[str] = frozenset()
    refuses: frozenset[str] = frozenset()


@dataclass(kw_only=True)
class _Shelf:
    """A member while models are placed."""

    room: MemberRoom
    most: int
    order: int
    models: set[str] = field(default_factory=set)
    size: int = 0
    load: float = 0.0

    def fits(self, model: ModelDemand, most: int | None = None) -> bool:
        if model.name in self.models or model.name in self.room.refuses:
            return False
        has_memory = not self.room.memory_size or self.size + model.size <= self.room.memory_size
        return has_memory and len(self.models) < (self.most if most is None else most)

    @property
    def is_over(self) -> bool:
        return len(self.models) > self.most or bool(self.room.memory_size and self.size > self.room.memory_size)


def _idleness(shelf: _Shelf) -> tuple[float, int, int]:
    return shelf.load, len(shelf.models), shelf.order


class _Placing:
    def __init__(self, models: Sequence[ModelDemand], members: Sequence[MemberRoom], most: int) -> None:
        self.models = {model.name: model for model in models}
        self.shelves = [_Shelf(room=room, most=most, order=i) for i, room in enumerate(members)]
        self.holders: dict[str, list[_Shelf]] = {name: [] for name in self.models}
        self.copies: dict[str, int] = {}

    def share(self, name: str) -> float:
        """Demand of one copy."""
        return self.models[name].demand / max(self.copies.get(name, 1), 1)

    def put(self, name: str, shelf: _Shelf) -> None:
        self.holders[name].append(shelf)
        shelf.models.add(name)
        shelf.size += self.models[name].size
        shelf.load += self.share(name)

    def take(self, name: str, shelf: _Shelf) -> None:
        self.holders[name].remove(shelf)
        shelf.models.remove(name)
        shelf.size -= self.models[name].size
        shelf.load -= self.share(name)

    def best(self, name: str, count: int = 1, most: int | None = None) -> list[_Shelf]:
        """The members with room for a model that have the least to do, at most `count`."""
        fitting = [shelf for shelf in self.shelves if shelf.fits(self.models[name], most)]
        return sorted(fitting, key=_idleness)[:count]


def place(models: Iterable[ModelDemand], members: Sequence[MemberRoom], models_per_member: int) -> Placement:
    """Decide which members serve each model.

    Args:
        models: all that shall be served.
        members: all that may serve them, in a steady order.
        models_per_member: the most that one serves, unless there are more models than all members together could serve.

    Returns:
        For each model its members; none for one that no member has the memory for, or that all refuse.
    """
    wanted = sorted(models, key=lambda model: (-model.demand, -model.size, model.name))
    if not members:
        return {model.name: frozenset() for model in wanted}
    most = max(models_per_member, -(-len(wanted) // len(members)))
    placing = _Placing(wanted, members, most)
    placing.copies = _copies(wanted, members, most * len(members))
    _keep(placing)
    _relieve(placing)
    _house(placing)
    _replicate(placing)
    _level(placing)
    return {name: frozenset(shelf.room.id for shelf in holders) for name, holders in placing.holders.items()}


def _copies(wanted: Sequence[ModelDemand], members: Sequence[MemberRoom], budget: int) -> dict[str, int]:
    """How many copies of each model there shall be."""
    copies = {model.name: 1 for model in wanted}
    present = {model.name: sum(model.name in member.serves for member in members) for model in wanted}

    def worth(model: ModelDemand) -> float:
        count = copies[model.name]
        return model.demand / count * (HOLD if count < present[model.name] else 1.0)

    queue = [(-worth(model), i) for i, model in enumerate(wanted)]
    heapq.heapify(queue)
    left = budget - len(wanted)
    while queue and left > 0:
        value, i = heapq.heappop(queue)
        name = wanted[i].name
        if -value >= (WORTH_SECOND if copies[name] == 1 else WORTH) and copies[name] < len(members):
            copies[name] += 1
            left -= 1
            heapq.heappush(queue, (-worth(wanted[i]), i))
    return copies


def _keep(placing: _Placing) -> None:
    """Leave copies where they are: where a model has too many, at the members with the least to do."""
    for name, count in placing.copies.items():
        holding = [shelf for shelf in placing.shelves if name in shelf.room.serves and name not in shelf.room.refuses]
        for shelf in sorted(holding, key=_idleness)[:count]:
            placing.put(name, shelf)


def _relieve(placing: _Placing) -> None:
    """Take from members that have too much: first what others serve too, then what has the least to do."""
    for shelf in placing.shelves:
        for name in sorted(shelf.models, key=lambda name: (len(placing.holders[name]) == 1, placing.share(name), name)):
            if not shelf.is_over:
                break
            placing.take(name, shelf)


def _house(placing: _Placing) -> None:
    """Find a place for each model that has none: the largest first, as they fit in few places."""
    homeless = [name for name, holders in placing.holders.items() if not holders]
    for name in sorted(homeless, key=lambda name: (-placing.models[name].size, -placing.share(name), name)):
        for shelf in placing.best(name) or _vacated(placing, name) or placing.best(name, most=len(placing.models)):
            placing.put(name, shelf)


def _vacated(placing: _Placing, name: str) -> list[_Shelf]:
    """A member that has room once it gives up copies of models that others serve too; those with the least to do."""
    for shelf in sorted(placing.shelves, key=_idleness):
        if name in shelf.room.refuses:
            continue
        spare = sorted(
            (one for one in shelf.models if len(placing.holders[one]) > 1), key=lambda one: (placing.share(one), one)
        )
        for i, one in enumerate(spare):
            placing.take(one, shelf)
            if shelf.fits(placing.models[name]):
                return [shelf]
            if i + 1 == len(spare):
                for given in spare:
                    placing.put(given, shelf)
    return []


def _replicate(placing: _Placing) -> None:
    """Place the further copies, as far as there is room."""
    for name, count in placing.copies.items():
        if len(placing.holders[name]) < count:
            for shelf in placing.best(name, count - len(placing.holders[name])):
                placing.put(name, shelf)


def _level(placing: _Placing) -> None:
    """Move models from the busiest member to the least busy one, as long as that helps clearly."""
    for _ in range(MOVES):
        busiest = max(placing.shelves, key=lambda shelf: (shelf.load, -shelf.order))
        idlest = min(placing.shelves, key=_idleness)
        mean = sum(shelf.load for shelf in placing.shelves) / len(placing.shelves)
        if busiest.load <= UNEVEN * mean or busiest.load - mean < WORTH:
            return
        gap = busiest.load - idlest.load
        movable = [one for one in busiest.models if placing.share(one) < gap / 2 and idlest.fits(placing.models[one])]
        if not movable:
            return
        name = max(movable, key=lambda one: (placing.share(one), one))
        placing.take(name, busiest)
        placing.put(name, idlest)


def moves(before: Mapping[str, frozenset[str]], after: Mapping[str, frozenset[str]]) -> int:
    """How many loads it takes to come from one placement to another."""
    return sum(len(members - before.get(name, frozenset())) for name, members in after.items())
