"""State of the controller that outlives it: the users' orders, and the counters of members that have ended.

All agents keep a copy for the next controller. Counters of an ended member are exact once its last counters arrive, and are
estimated from its reports until then.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.fleet.control.reports import ModelOrder, ModelReport, SettingsChanges
from halfserve.serve.fleet.member.member_counters import MemberCounters, counters_of, with_statistics

EXACT = 32  # counters kept separately before they are summed, because summing takes several ms
ESTIMATED = 32  # members whose exact counters may still arrive
KNOWN = 1024  # member ids remembered as already included in the total


class ClusterMemory:
    """State that a new controller must recover.

    Attributes:
        number: revision of this state; increases with each change, across controllers.
        generation: largest generation of all orders.
        models: orders that apply to all members, by model; None until a repository has been reported.
        settings: log and trace settings that users changed: number, method path and serialized request by setting.
        settings_number: number of the latest settings change.
        ended: counters of members that have ended.
    """

    def __init__(self) -> None:
        self.number = 0
        self.generation = 0
        self.models: dict[str, ModelOrder] | None = None
        self.settings: dict[str, tuple[int, str, bytes]] = {}
        self.settings_number = 0
        self.ended = EndedCounters()
        self._bytes: tuple[int, bytes] | None = None

    @property
    def loaded(self) -> dict[str, ModelOrder]:
        """The orders for all members, by model."""
        return self.models or {}

    def changed(self) -> None:
        """Increase the revision, so that agents receive the present state."""
        self.number += 1

    def order(self, name: str, request: bytes = b"") -> ModelOrder:
        """Create a new order, which does not apply to all members yet; for `request` see `ModelOrder`."""
        self.generation += 1
        plain = pb.RepositoryModelLoadRequest(model_name=name)
        return ModelOrder(generation=self.generation, request=request or plain.SerializeToString())

    def set(self, settings: Mapping[str, bytes], path: str) -> None:
        """Record settings of logs or traces for all members: serialized requests for the method at `path`, by setting."""
        self.settings_number += 1
        self.settings |= {name: (self.settings_number, path, one) for name, one in settings.items()}
        self.changed()

    def settings_since(self, number: int) -> SettingsChanges | None:
        """Return the settings that changed after change `number`; None if there are none."""
        if number == self.settings_number:
            return None
        changed = [(path, one) for at, path, one in self.settings.values() if at > number]
        return SettingsChanges(number=self.settings_number, changes=changed)

    def begin(self, names: Iterable[str]) -> None:
        """Order these models for all members."""
        self.models = {name: self.order(name) for name in sorted(names)}
        self.changed()

    def to_bytes(self) -> bytes:
        """Serialize the whole state for `adopt`; the result is cached until the next change."""
        if self._bytes is None or self._bytes[0] != self.number:
            models = {name: [one.generation, _text(one.request)] for name, one in self.loaded.items()}
            content = {
                "number": self.number,
                "generation": self.generation,
                "models": None if self.models is None else models,
                "settings": {name: [number, path, _text(one)] for name, (number, path, one) in self.settings.items()},
                "settings_number": self.settings_number,
                "ended": self.ended.to_json(),
            }
            self._bytes = self.number, zlib.compress(json.dumps(content).encode(), 1)
        return self._bytes[1]

    def adopt(self, data: bytes) -> None:
        """Replace this state by the one that another controller serialized, if that is newer."""
        content: dict[str, Any] = json.loads(zlib.decompress(data))
        if content["number"] <= self.number:
            return
        self.number = content["number"]
        self.generation = max(self.generation, content["generation"])
        if content["models"] is not None:
            self.models = {
                name: ModelOrder(generation=generation, request=base64.b64decode(request))
                for name, (generation, request) in content["models"].items()
            }
        self.settings = {
            name: (number, path, base64.b64decode(one)) for name, (number, path, one) in content["settings"].items()
        }
        self.settings_number = content["settings_number"]
        self.ended = EndedCounters.from_json(content["ended"])


class EndedCounters:
    """Counters of all members that have ended, in bounded memory."""

    def __init__(self) -> None:
        self._total = MemberCounters().to_bytes()
        self._exact: list[bytes] = []
        self._estimated: dict[str, bytes] = {}
        self._known: dict[str, None] = {}

    def end(self, member: str, counters: bytes, *, exact: bool) -> bool:
        """Count a member's last counters; `exact` ones replace estimates. Returns whether this changed the sum."""
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
