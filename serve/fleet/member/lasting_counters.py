"""Counters of a server in a cluster: they never restart while the server runs, and outlive it.

A cluster's sums count everything that a model has answered, including versions that were replaced since. A server keeps its
files in a folder of its own: a counter file for each version that it serves or is unloading, the statistics of versions that it
has unloaded, and all other counters, some seconds old.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.metrics_core import Metric

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.model_statistics import Totals
from halfserve.serve.fleet.member.counter_file import SUFFIX as FILE_SUFFIX
from halfserve.serve.fleet.member.counter_file import CounterFile, CounterFiles, read_counter_file
from halfserve.serve.fleet.member.member_counters import MemberCounters, counters_of, with_statistics
from halfserve.serve.observability.metrics import guard_metrics, model_metrics, sequence_metrics, triton_metrics
from halfserve.serve.protocol.rpcs import model_statistics

logger = logging.getLogger(__name__)

OWN = "server"  # start of the counter files' file names
COUNTERS, LET_GO = "counters", "let-go"
REFUSALS = ("queue_full", "overloaded", "rate_limited")


@dataclass(kw_only=True)
class ModelSums:
    """Sums over all versions of a model since the server's start; for the fields see `ModelReport`."""

    requests: int = 0
    rows: int = 0
    failures: int = 0
    refusals: int = 0
    queue_ns: int = 0
    compute_ns: int = 0

    def add(self, totals: Totals) -> None:
        self.requests += totals.success.count
        self.rows += totals.rows
        self.failures += totals.fail.count
        self.refusals += sum(totals.failures.get(reason, 0) for reason in REFUSALS)
        self.queue_ns += totals.queue.ns
        self.compute_ns += sum(size.compute_infer.ns for size in totals.by_batch_size.values())


class LastingCounters:
    """Keeps a server's counters in files. Lives on the event loop."""

    def __init__(self, folder: Path, core: InferenceCore) -> None:
        """Start the counters of a server without models; `folder` is for their files only."""
        self._folder = folder
        self._core = core
        self._files = CounterFiles(folder, OWN, core, self._lets_go)
        self._leaving: dict[Model, CounterFile | None] = {}
        self._counted: list[CounterFile] = []  # counter files of unloaded models, to be removed
        self._let_go = MemberCounters()
        self._sums: dict[str, ModelSums] = {}  # sums of unloaded models, by name
        self._changes = 0

    def follow(self) -> None:
        """Count the models that are served now; must be called after each change."""
        self._changes += 1
        self._files.follow()

    def sums(self) -> dict[str, ModelSums]:
        """Sums of each model that was ever served, by name."""
        found = {name: ModelSums(**vars(sums)) for name, sums in self._sums.items()}
        for model in (*self._core.models(), *self._leaving):
            found.setdefault(model.name, ModelSums()).add(model.statistics.totals)
        return found

    async def counters(self) -> MemberCounters:
        """All counters, exact at the end of this call, and the current gauges."""
        while True:
            before = self._changes
            counters = await MemberCounters.of(self._core)
            if self._changes == before:  # otherwise a model may be counted twice or not at all
                break
        for model in self._leaving:
            counters.add(_model_counters(model))
        counters.add(self._let_go)
        counters.metrics = with_statistics(counters.metrics, counters.statistics)
        return counters

    async def write(self) -> None:
        """Write all current counters to the folder.

        Raises:
            OSError: the disk is full, or the folder is gone.
        """
        (await self.counters()).write(self._folder / COUNTERS)

    def _lets_go(self, model: Model, counter_file: CounterFile | None) -> None:
        self._leaving[model] = counter_file
        leaving = self._core.leaving(model)
        if leaving is None:
            self._has_left(model)
        else:
            leaving.add_done_callback(lambda _: self._has_left(model))

    def _has_left(self, model: Model) -> None:
        """Keep the counters of a model that has answered its last request, but not the model itself."""
        self._changes += 1
        counter_file = self._leaving.pop(model)
        self._let_go.add(_model_counters(model))
        self._sums.setdefault(model.name, ModelSums()).add(model.statistics.totals)
        if counter_file is not None:
            self._counted.append(counter_file)
        # The names mark these counter files as already counted, in case this process ends before it removes them.
        names = json.dumps([one.path.name for one in self._counted]).encode()
        try:
            _write(self._folder / LET_GO, names + b"\n" + self._let_go.statistics.SerializeToString())
        except OSError as error:
            logger.warning("what %s has counted may be lost with this process: %s", model.name, error.strerror)
            return
        for one in self._counted:
            one.close()
        self._counted.clear()


def left_counters(folder: Path) -> MemberCounters:
    """Counters of a server that has ended: exact statistics, however it ended; other counters may lack some seconds.

    Raises:
        OSError: the folder cannot be read.
    """
    total, counted = MemberCounters(), list[str]()
    if (folder / LET_GO).exists():
        names, _, statistics = (folder / LET_GO).read_bytes().partition(b"\n")
        counted = json.loads(names)
        total.statistics.ParseFromString(statistics)
    for path in sorted(folder.glob(f"*{FILE_SUFFIX}")):
        of_model = None if path.name in counted else read_counter_file(path)
        if of_model is not None:
            total.add(MemberCounters(statistics=pb.ModelStatisticsResponse(model_stats=[of_model])))
    return MemberCounters.left(folder / COUNTERS, total.statistics)


def _model_counters(model: Model) -> MemberCounters:
    metrics: Iterable[Metric] = (
        metric for read in (triton_metrics, model_metrics, guard_metrics, sequence_metrics) for metric in read([model])
    )
    statistics = pb.ModelStatisticsResponse(model_stats=[model_statistics(model)])
    return MemberCounters(statistics=statistics, metrics=counters_of(metrics))


def _write(path: Path, data: bytes) -> None:
    hidden = path.with_name(f".{path.name}")
    hidden.write_bytes(data)
    hidden.rename(path)
