"""The counters of one member: for the others, and left behind for them when it ends."""

from __future__ import annotations

import base64
import fcntl
import json
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.metrics_core import Metric

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.members.merging import add_statistics, counters_of, merge_metrics
from halfserve.serve.observability.exposition import collect
from halfserve.serve.protocol.rpcs import model_statistics

SUFFIX = ".figures"
LOCK = "figures.lock"
DEPARTED = "departed"


@dataclass(kw_only=True)
class Figures:
    """What one member counts, or several together.

    Attributes:
        statistics: of its models.
        metrics: all of them, each name once.
    """

    statistics: pb.ModelStatisticsResponse = field(default_factory=pb.ModelStatisticsResponse)
    metrics: list[Metric] = field(default_factory=list)

    @classmethod
    async def of(cls, core: InferenceCore) -> Figures:
        """The present ones of a server."""
        metrics: dict[str, Metric] = {}
        async for metric in collect(core):
            known = metrics.setdefault(metric.name, metric)
            if known is not metric:
                known.samples += metric.samples
        statistics = pb.ModelStatisticsResponse(model_stats=[model_statistics(model) for model in core.models()])
        return cls(statistics=statistics, metrics=list(metrics.values()))

    def to_bytes(self) -> bytes:
        metrics = [
            [one.name, one.documentation, one.type, [[sample.name, sample.labels, sample.value] for sample in one.samples]]
            for one in self.metrics
        ]
        statistics = base64.b64encode(self.statistics.SerializeToString()).decode()
        return json.dumps({"statistics": statistics, "metrics": metrics}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Figures:
        """Read what `to_bytes` has written."""
        content = json.loads(data)
        figures = cls()
        figures.statistics.ParseFromString(base64.b64decode(content["statistics"]))
        for name, text, kind, samples in content["metrics"]:
            metric = Metric(name, text, kind)
            for sample in samples:
                metric.add_sample(*sample)
            figures.metrics.append(metric)
        return figures


class LeftFigures:
    """The figures in the folder of all members: those of the living, as of some seconds ago, and of those that have ended."""

    def __init__(self, folder: Path, own: str) -> None:
        """The figures in a folder; `own` is the name of this member."""
        self._folder = folder
        self._own = own

    def write(self, figures: Figures) -> None:
        """Leave this member's figures behind, in place of earlier ones."""
        self._write(f"{self._own}{SUFFIX}", figures)

    def mark(self) -> object:
        """Equal marks: none that had ended was counted among others meanwhile."""
        try:
            return (self._folder / f"{DEPARTED}{SUFFIX}").stat().st_ino
        except FileNotFoundError:
            return None

    def of_ended(self, living: Collection[str]) -> list[Figures]:
        """The counters of all that have ended: whose names are neither of the living nor this member's own."""
        with self._locked(fcntl.LOCK_SH):
            return [self._read(path) for path in self._paths(living)]

    def fold(self, living: Collection[str]) -> None:
        """Make one file of those that have ended."""
        with self._locked(fcntl.LOCK_EX):
            paths = self._paths(living)
            if len(paths) < 2:
                return
            total = Figures()
            for path in paths:
                _add(total, self._read(path))
            self._write(f"{DEPARTED}{SUFFIX}", total)
            for path in paths:
                if path.stem != DEPARTED:
                    path.unlink()

    def forget_model(self, name: str, living: Collection[str]) -> None:
        """Those that have ended have no counters of this model: it was loaded again, or is no more."""
        with self._locked(fcntl.LOCK_EX):
            for path in self._paths(living):
                figures = self._read(path)
                kept = [one for one in figures.statistics.model_stats if one.name != name]
                del figures.statistics.model_stats[:]
                figures.statistics.model_stats.extend(kept)
                for metric in figures.metrics:
                    metric.samples = [sample for sample in metric.samples if sample.labels.get("model") != name]
                self._write(path.name, figures)

    def _paths(self, living: Collection[str]) -> list[Path]:
        return sorted(path for path in self._folder.glob(f"*{SUFFIX}") if path.stem not in {*living, self._own})

    def _read(self, path: Path) -> Figures:
        figures = Figures.from_bytes(path.read_bytes())
        figures.metrics = counters_of(figures.metrics)
        return figures

    def _write(self, name: str, figures: Figures) -> None:
        hidden = self._folder / f".{name}.new"
        hidden.write_bytes(figures.to_bytes())
        hidden.rename(self._folder / name)

    @contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        file = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, how)  # for some milliseconds
            yield
        finally:
            os.close(file)


def _add(total: Figures, one: Figures) -> None:
    known = {(model.name, model.version) for model in total.statistics.model_stats}
    add_statistics(total.statistics, [one.statistics])
    total.statistics.model_stats.extend(
        model for model in one.statistics.model_stats if (model.name, model.version) not in known
    )
    total.metrics = merge_metrics(total.metrics, [one.metrics], everything=True)
