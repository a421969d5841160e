"""Placement of models over time: measures demand, and moves models without leaving any unserved."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from halfserve.serve.fleet.control.member_record import MemberRecord
from halfserve.serve.fleet.control.placement import MemberRoom, ModelDemand, Placement, place
from halfserve.serve.fleet.control.reports import ModelOrder

REVIEW_S = 5.0  # interval between two placements while no member and no model joins or leaves
PLACES_S = 1e5  # (member, model) pairs that are decided on per second; large clusters decide less often
RISE, FALL = 0.5, 0.1  # weight of a new measurement: demand rises quickly and falls slowly


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
        """Compute a new placement if that is due. Returns whether it differs from the last one.

        Args:
            members: all members; leaving ones are assigned no new models.
            models: all models to serve, with their orders; None for a model whose first load is in progress.
            now: time in seconds.
            at_once: compute a placement even if none is due.
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
        for name in sorted(placed - served, key=lambda name: (name not in record.given.generations, name)):
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
                measured[name] += record.model_load(name).compute
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
