"""Counters of members that have ended: exact once their last counters arrive, estimated from their reports until then."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.fleet.control.reports import ModelReport
from halfserve.serve.fleet.member.member_counters import MemberCounters
from halfserve.serve.fleet.member.merging import counters_of, with_statistics

EXACT = 32  # counters kept separately before they are summed, because summing takes several ms
ESTIMATED = 32  # members whose exact counters may still arrive
KNOWN = 1024  # member ids remembered as already included in the total


class EndedCounters:
    """Counters of all members that have ended, in bounded memory."""

    def __init__(self) -> None:
        self._total = MemberCounters().to_bytes()
        self._exact: list[bytes] = []
        self._estimated: dict[str, bytes] = {}
        self._known: dict[str, None] = {}

    def end(self, member: str, counters: bytes, *, exact: bool) -> bool:
        """Count a member's last counters, replacing an estimate. Returns whether this changed the sum.

        Args:
            member: id of the member.
            counters: `MemberCounters.to_bytes()`.
            exact: whether the counters are final rather than estimated.
        """
        if member in self._known:
            return False
        self._estimated.pop(member, None)
        if exact:
            self._settle(member, counters)
        else:
            self._estimated[member] = counters
            while len(self._estimated) > ESTIMATED:
                oldest = next(iter(self._estimated))
                self._settle(oldest, self._estimated.pop(oldest))
        return True

    def revive(self, member: str) -> bool:
        """Drop a member's estimate because it reports again. Returns whether there was an estimate."""
        return self._estimated.pop(member, None) is not None

    def has(self, member: str) -> bool:
        """Whether the member's exact counters are included."""
        return member in self._known

    def all(self) -> list[bytes]:
        """Serialized counters whose sum is the total."""
        return [self._total, *self._exact, *self._estimated.values()]

    def to_json(self) -> dict[str, Any]:
        """Serialize all state for `from_json`."""
        return {
            "total": _text(added(self._total, *self._exact).to_bytes()),
            "estimated": {member: _text(counters) for member, counters in self._estimated.items()},
            "known": list(self._known),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> EndedCounters:
        """Restore the state that `to_json` serialized."""
        made = cls()
        made._total = base64.b64decode(content["total"])
        made._estimated = {member: base64.b64decode(text) for member, text in content["estimated"].items()}
        made._known = dict.fromkeys(content["known"])
        return made

    def _settle(self, member: str, counters: bytes) -> None:
        self._exact.append(_without_gauges(counters))
        self._known[member] = None
        if len(self._known) > KNOWN:
            del self._known[next(iter(self._known))]
        if len(self._exact) > EXACT:
            self._total, self._exact = added(self._total, *self._exact).to_bytes(), []


def added(*all_counters: bytes) -> MemberCounters:
    """The sum of the counters of several members."""
    total = MemberCounters()
    for counters in all_counters:
        total.add(MemberCounters.from_bytes(counters))
    return total


def estimate(counters: bytes | None, then: Mapping[str, ModelReport], now: Mapping[str, ModelReport]) -> bytes:
    """Estimate the last counters of a member that ended without reporting them.

    Args:
        counters: the last counters that it reported; None if it reported none.
        then: its model reports at the time of those counters.
        now: its model reports in its last report.
    """
    made = MemberCounters() if counters is None else MemberCounters.from_bytes(counters)
    for name, model in now.items():
        before = then.get(name, ModelReport())
        if model.requests > before.requests or model.failures > before.failures:
            _count(_statistics_of(made.statistics, name, model.versions), before, model)
    made.metrics = with_statistics(counters_of(made.metrics), made.statistics)
    return made.to_bytes()


def _statistics_of(statistics: pb.ModelStatisticsResponse, name: str, versions: tuple[str, ...]) -> pb.ModelStatistics:
    """Statistics of the model's newest version, because reports do not distinguish versions."""
    known = [one for one in statistics.model_stats if one.name == name]
    version = max(versions or tuple(one.version for one in known) or ("1",), key=lambda number: (len(number), number))
    return next((one for one in known if one.version == version), None) or statistics.model_stats.add(
        name=name, version=version
    )


def _count(statistics: pb.ModelStatistics, before: ModelReport, now: ModelReport) -> None:
    answered, stats = now.requests - before.requests, statistics.inference_stats
    statistics.inference_count += now.rows - before.rows
    queue_ns, compute_ns = now.queue_ns - before.queue_ns, now.compute_ns - before.compute_ns
    for duration, count, ns in (
        (stats.success, answered, queue_ns + compute_ns),
        (stats.queue, answered, queue_ns),
        (stats.compute_infer, answered, compute_ns),
        (stats.fail, now.failures - before.failures, 0),
    ):
        duration.count += count
        duration.ns += ns


def _without_gauges(counters: bytes) -> bytes:
    read = MemberCounters.from_bytes(counters)
    read.metrics = counters_of(read.metrics)
    return read.to_bytes()


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
