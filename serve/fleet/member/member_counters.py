"""Counters of one member: sent to the other members, and left behind for them when it ends."""

from __future__ import annotations

import base64
import fcntl
import json
import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.metrics_core import Metric

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.fleet.member.counter_file import SUFFIX as LEDGER
from halfserve.serve.fleet.member.counter_file import read_counter_file
from halfserve.serve.fleet.member.merging import add_statistics, counters_of, merge_metrics, model_of, with_statistics
from halfserve.serve.observability.exposition import collect
from halfserve.serve.protocol.rpcs import model_statistics

SUFFIX = ".counters"
LOCK = "figures.lock"
DEPARTED = "departed"


@dataclass(kw_only=True)
class MemberCounters:
    """Counters of one member, or the sum of several.

    Attributes:
        statistics: statistics of its models.
        metrics: all metrics, with each name once.
    """

    statistics: pb.ModelStatisticsResponse = field(default_factory=pb.ModelStatisticsResponse)
    metrics: list[Metric] = field(default_factory=list)

    @classmethod
    async def of(cls, core: InferenceCore) -> MemberCounters:
        """Read the current counters of a server."""
        metrics: dict[str, Metric] = {}
        async for metric in collect(core):
            known = metrics.setdefault(metric.name, metric)
            if known is not metric:
                known.samples += metric.samples
        statistics = pb.ModelStatisticsResponse(model_stats=[model_statistics(model) for model in core.models()])
        return cls(statistics=statistics, metrics=list(metrics.values()))

    def add(self, other: MemberCounters) -> None:
        """Add the counters of another member, for all of its models."""
        known = {(model.name, model.version) for model in self.statistics.model_stats}
        add_statistics(self.statistics, [other.statistics])
        self.statistics.model_stats.extend(
            model for model in other.statistics.model_stats if (model.name, model.version) not in known
        )
        self.metrics = merge_metrics(self.metrics, [other.metrics], everything=True)

    def to_bytes(self) -> bytes:
        metrics = [
            [one.name, one.documentation, one.type, [[sample.name, sample.labels, sample.value] for sample in one.samples]]
            for one in self.metrics
        ]
        statistics = base64.b64encode(self.statistics.SerializeToString()).decode()
        return json.dumps({"statistics": statistics, "metrics": metrics}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> MemberCounters:
        """Restore what `to_bytes` serialized."""
        content = json.loads(data)
        counters = cls()
        counters.statistics.ParseFromString(base64.b64decode(content["statistics"]))
        for name, text, kind, samples in content["metrics"]:
            metric = Metric(name, text, kind)
            for sample in samples:
                metric.add_sample(*sample)
            counters.metrics.append(metric)
        return counters


class CounterFolder:
    """Counters in the members' shared folder: those of living members, some seconds old, and those of members that ended.

    The statistics of ended members are exact, because of their ledgers; other counters may lack the last seconds.
    """

    def __init__(self, folder: Path, own: str) -> None:
        """Access the counters in a folder; `own` is the name of this member."""
        self._folder = folder
        self._own = own

    def write(self, counters: MemberCounters) -> None:
        """Write this member's counters, replacing earlier ones."""
        self._write(self._own, counters)

    def mark(self) -> object:
        """Marker that changes when `fold` merges ended members; if it is equal, none was merged in between."""
        try:
            return (self._folder / f"{DEPARTED}{SUFFIX}").stat().st_ino
        except FileNotFoundError:
            return None

    def of_ended(self, living: Collection[str]) -> list[MemberCounters]:
        """Counters of all members that have ended: those named neither in `living` nor like this member."""
        with self._locked(fcntl.LOCK_SH):
            return [self._read(name) for name in self._ended(living)]

    def fold(self, living: Collection[str]) -> None:
        """Merge the counters of all ended members into one file."""
        with self._locked(fcntl.LOCK_EX):
            ended = self._ended(living)
            if ended in ([], [DEPARTED]):
                return
            total = MemberCounters()
            for name in ended:
                total.add(self._read(name))
            self._write(DEPARTED, total)
            for name in ended:
                self._remove(
                    self._ledgers(name) if name == DEPARTED else [*self._ledgers(name), self._folder / f"{name}{SUFFIX}"]
                )

    def forget_model(self, model: str, version: int, living: Collection[str]) -> None:
        """Remove a version's counters from those of ended members, because it was reloaded or is no longer served."""
        labels = (model, str(version))
        with self._locked(fcntl.LOCK_EX):
            for name in self._ended(living):
                counters = self._read(name)
                kept = [one for one in counters.statistics.model_stats if (one.name, one.version) != labels]
                del counters.statistics.model_stats[:]
                counters.statistics.model_stats.extend(kept)
                for metric in counters.metrics:
                    metric.samples = [one for one in metric.samples if model_of(one.labels) != labels]
                self._write(name, counters)
                self._remove(self._ledgers(name))

    def _ended(self, living: Collection[str]) -> list[str]:
        files = [*self._folder.glob(f"*{SUFFIX}"), *self._folder.glob(f"*{LEDGER}")]
        return sorted({path.name.partition(".")[0] for path in files} - {*living, self._own})

    def _read(self, name: str) -> MemberCounters:
        path = self._folder / f"{name}{SUFFIX}"
        counters = MemberCounters.from_bytes(path.read_bytes()) if path.exists() else MemberCounters()
        found = [statistics for ledger in self._ledgers(name) if (statistics := read_counter_file(ledger)) is not None]
        if found:
            counters.statistics = pb.ModelStatisticsResponse(model_stats=found)
            counters.metrics = with_statistics(counters.metrics, counters.statistics)
        counters.metrics = counters_of(counters.metrics)
        return counters

    def _ledgers(self, name: str) -> list[Path]:
        return sorted(self._folder.glob(f"{name}.*{LEDGER}"))

    def _write(self, name: str, counters: MemberCounters) -> None:
        hidden = self._folder / f".{name}.new"
        hidden.write_bytes(counters.to_bytes())
        hidden.rename(self._folder / f"{name}{SUFFIX}")

    @staticmethod
    def _remove(paths: Iterable[Path]) -> None:
        for path in paths:
            path.unlink(missing_ok=True)

    @contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        file = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, how)  # held for some milliseconds
            yield
        finally:
            os.close(file)
