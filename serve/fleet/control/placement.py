"""Assigns models to members, over time (`PlacedModels`) and at one time (`place`, a pure function of loads and placement).

Each model has at least one copy, and more according to its demand: the next copy goes to the model with the most demand per
copy (D'Hondt's method of highest averages), as long as each copy has enough load. An existing copy stays where it is unless
another place is clearly better, because each move costs a load.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from halfserve.serve.fleet.control.member_table import MemberRecord
from halfserve.serve.fleet.control.reports import ModelOrder

HOLD = 2.0  # weight of an existing copy, relative to a new one
WORTH = 0.05  # least demand per copy (concurrent batches) that justifies a further copy
WORTH_SECOND = 0.001  # demand that justifies the second copy: a model in use must survive the loss of a member
UNEVEN = 1.5  # a member above this multiple of the mean load gives up a model
MOVES = 2  # moves per decision to even out loads
REVIEW_S = 5.0  # interval between two placements while no member and no model joins or leaves
PLACES_S = 1e5  # (member, model) pairs that are decided on per second; large clusters decide less often
RISE, FALL = 0.5, 0.1  # weight of a new measurement: demand rises quickly and falls slowly

Placement = dict[str, frozenset[str]]  # ids of the members of each model


@dataclass(frozen=True, kw_only=True)
class ModelDemand:
    """A model to be placed.

    Attributes:
        name: name of the model.
        demand: average number of batches that compute concurrently in the whole cluster.
        size: memory in bytes at each member; 0 if unknown.
    """

    name: str
    demand: float = 0.0
    size: int = 0


@dataclass(frozen=True, kw_only=True)
class MemberRoom:
    """A member that models can be placed on.

    Attributes:
        id: id of the member.
        memory_size: memory for models in bytes; 0 if unknown.
        serves: names of the models that it serves or is loading.
        refuses: names of the models that it could not load.
    """

    id: str
    memory_size: int = 0
    serves: frozenset[str] = frozenset()
    refuses: frozenset[str] = frozenset()


@dataclass(kw_only=True)
class _Shelf:
    """State of one member during placement."""

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
        """Demand per copy of a model."""
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
        """The least loaded members with room for a model, at most `count`."""
        fitting = [shelf for shelf in self.shelves if shelf.fits(self.models[name], most)]
        return sorted(fitting, key=_idleness)[:count]


def place(models: Iterable[ModelDemand], members: Sequence[MemberRoom], models_per_member: int) -> Placement:
    """Decide which members, which are in a stable order, serve each model.

    A member gets at most `models_per_member`, or more where the members together could not hold all models otherwise.

    Returns:
        Ids of the members of each model; empty for a model that fits in no member's memory, or that all members refuse.
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
    """Number of copies of each model."""
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
    """Keep existing copies in place; where a model has too many, keep those at the least loaded members."""
    for name, count in placing.copies.items():
        holding = [shelf for shelf in placing.shelves if name in shelf.room.serves and name not in shelf.room.refuses]
        for shelf in sorted(holding, key=_idleness)[:count]:
            placing.put(name, shelf)


def _relieve(placing: _Placing) -> None:
    """Remove models from overfull members: first those with other copies, then those with the least load."""
    for shelf in placing.shelves:
        for name in sorted(shelf.models, key=lambda name: (len(placing.holders[name]) == 1, placing.share(name), name)):
            if not shelf.is_over:
                break
            placing.take(name, shelf)


def _house(placing: _Placing) -> None:
    """Place each model that has no copy, the largest first, because large models fit on the fewest members."""
    homeless = [name for name, holders in placing.holders.items() if not holders]
    for name in sorted(homeless, key=lambda name: (-placing.models[name].size, -placing.share(name), name)):
        for shelf in placing.best(name) or _vacated(placing, name) or placing.best(name, most=len(placing.models)):
            placing.put(name, shelf)


def _vacated(placing: _Placing, name: str) -> list[_Shelf]:
    """Make room at a member by removing copies of models that have others, the least loaded first."""
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
    """Number of loads needed to get from one placement to another."""
    return sum(len(members - before.get(name, frozenset())) for name, members in after.items())


class PlacedModels:
    """Assignment of models to members. Without a limit, every member serves every model."""

    def __init__(self, models_per_member: int) -> None:
        """Start without a placement; `models_per_member` is the most models per member, 0 for no limit."""
        self._most = models_per_member
        self._placement: Placement = {}
        self._by_member: dict[str, set[str]] = {}  # the same placement, by member
        self._demand: dict[str, float] = {}
        self._refused: dict[tuple[str, str], int] = {}  # generation that could not be loaded, by member and model
        self._review_at = 0.0
        self._may_review_at = 0.0
        self._is_stale = True

    def expire(self) -> None:
        """Request a new placement, because a member or model joined or left, or a load failed."""
        self._is_stale = True

    def review(
        self, members: Collection[MemberRecord], models: Mapping[str, ModelOrder | None], now: float, *, at_once: bool = False
    ) -> bool:
        """Compute a new placement if that is due, or `at_once`. Returns whether it differs from the last one.

        Leaving members are assigned no new models. `models` has None for a model whose first load is in progress.
        """
        is_due = now >= self._review_at or (self._is_stale and now >= self._may_review_at)
        if not self._most or not (is_due or at_once):
            return False
        if now >= self._review_at:
            self._measure(members, models)
            self._review_at = now + REVIEW_S
        self._is_stale = False
        self._may_review_at = now + len(members) * len(models) / PLACES_S
        staying = [record for record in members if not record.is_leaving]
        self._remember_refusals(staying, models)
        wanted = [ModelDemand(name=name, demand=self._demand.get(name, 0.0), size=largest(members, name)) for name in models]
        ids = {record.id for record in staying}
        held = {name for name, holders in self._placement.items() if holders & ids}
        rooms = [self._room(record, models, held) for record in staying]
        before, self._placement = self._placement, place(wanted, rooms, self._most)
        self._by_member = {record.id: set() for record in staying}
        for name, holders in self._placement.items():
            for member in holders:
                self._by_member[member].add(name)
        return before != self._placement

    def has(self, record: MemberRecord, name: str) -> bool:
        """Whether a model is assigned to a member."""
        return not self._most or record.id in self._placement.get(name, ())

    def orders(self, record: MemberRecord, names: Mapping[str, object], members: Mapping[str, MemberRecord]) -> list[str]:
        """Models that a member serves now: those placed there, and those it keeps until their new members serve them.

        A newly placed model that does not fit beside the kept ones waits until there is memory.
        """
        if not self._most:
            return list(names)
        served = record.served
        placed = names.keys() & self._by_member.get(record.id, ())
        waiting = [name for name in served if name in names and name not in placed and not self._is_elsewhere(name, members)]
        if not record.report.memory_size or served <= placed:
            return [*placed, *waiting]
        used = sum(record.model(name).size for name in served)
        found = [*(placed & served), *waiting]
        for name in sorted(placed - served, key=lambda name: (name not in record.sent.models, name)):
            size = largest(members.values(), name)
            if used + size <= record.report.memory_size:
                used += size
                found.append(name)
        return found

    def awaits(self, record: MemberRecord, members: Mapping[str, MemberRecord]) -> bool:
        """Whether a leaving member serves a model that the members assigned to it do not serve yet."""
        if not self._most:
            return False
        placed = (name for name in record.served if self._placement.get(name))
        return self._is_stale or not all(self._is_elsewhere(name, members) for name in placed)

    def _is_elsewhere(self, name: str, members: Mapping[str, MemberRecord]) -> bool:
        """Whether all members assigned the model serve it, according to a published directory."""
        placed = [members[one] for one in self._placement.get(name, ()) if one in members]
        return bool(placed) and all(one.serves(name) and name in one.published for one in placed)

    def _room(self, record: MemberRecord, models: Mapping[str, object], held: set[str]) -> MemberRoom:
        """Placement input for a member; includes models that it serves because of an earlier controller's placement."""
        return MemberRoom(
            id=record.id,
            memory_size=record.report.memory_size,
            serves=frozenset((self._by_member.get(record.id, set()) & held | record.served - held) & models.keys()),
            refuses=frozenset(name for member, name in self._refused if member == record.id),
        )

    def _measure(self, members: Collection[MemberRecord], models: Iterable[str]) -> None:
        measured = dict.fromkeys(models, 0.0)
        for record in members:
            for name in record.served & measured.keys():
                measured[name] += record.meter.model_load(name).compute
        for name, demand in measured.items():
            before = self._demand.get(name, demand)
            measured[name] = before + (RISE if demand > before else FALL) * (demand - before)
        self._demand = measured

    def _remember_refusals(self, members: Collection[MemberRecord], models: Mapping[str, ModelOrder | None]) -> None:
        ordered = {name: order.generation for name, order in models.items() if order is not None}
        ids = {record.id for record in members}
        found = {
            (member, name): generation
            for (member, name), generation in self._refused.items()
            if member in ids and ordered.get(name) == generation
        }
        for record in members:
            for name in record.failed - record.served:
                if ordered.get(name) == record.model(name).generation:
                    found[record.id, name] = ordered[name]
        self._refused = found


def largest(members: Iterable[MemberRecord], name: str) -> int:
    """Size of a model in bytes, at the member where it is largest."""
    return max((record.model(name).size for record in members), default=0)
