"""Counters of members in files of a folder, where they outlive the member.

A member has a counter file for each version that it serves, whose statistics are exact however it ends, and one file with all
other counters, some seconds old. They count everything that a model has answered, including versions that were replaced since.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from halfserve.protos import inference_pb2 as pb
from halfserve.protos.agent_pb2 import ModelState
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.model_statistics import Totals
from halfserve.serve.fleet.member.counter_file import SUFFIX as FILE_SUFFIX
from halfserve.serve.fleet.member.counter_file import CounterFile, read_counter_file
from halfserve.serve.fleet.member.member_counters import MemberCounters, add_statistics, counters_of, with_statistics
from halfserve.serve.observability.model_metrics import model_metrics
from halfserve.serve.protocol.rpcs import model_statistics
from halfserve.serve.transports.listener import LogThrottle

logger = logging.getLogger(__name__)

SUFFIX, LET_GO = ".counters", ".let-go"
LOCK = "figures.lock"
DEPARTED = "departed"
KEEP_S = 5.0  # interval between two writes of a member's counters, which take some ms; exact statistics are in counter files
REFUSALS = ("queue_full", "overloaded", "rate_limited")


class CounterKeeper:
    """Keeps the counters of one member in files. Lives on the event loop."""

    def __init__(
        self,
        folder: Path,
        name: str,
        core: InferenceCore,
        gone: Callable[[Model, CounterFile | None], None],
        read: Callable[[], Awaitable[MemberCounters]],
    ) -> None:
        """Start without files.

        Args:
            folder: folder for the files.
            name: name of the member, with which the names of its files begin.
            core: core whose models are counted.
            gone: called with a model that is no longer served, and its counter file, which the callee closes; None if the disk
                had no space for one.
            read: reads all counters of the member.
        """
        self._folder = folder
        self._name = name
        self._core = core
        self._gone = gone
        self._read = read
        self._open: dict[Model, CounterFile | None] = {}
        self._made = 0
        self._keeping: asyncio.Task[None] | None = None

    def begin(self, state: Callable[[], object]) -> None:
        """Count the models that are served now, and write the other counters when `state` has changed."""
        self.follow()
        self._core.on_change(self.follow)
        self._keeping = asyncio.create_task(self._keep(state))

    def follow(self) -> None:
        """Open a counter file for each served model, and give up those of other models."""
        models = self._core.models()
        for model in [model for model in self._open if model not in models]:
            self._gone(model, self._open.pop(model))
        for model in models:
            if model not in self._open:
                self._made += 1
                self._open[model] = model.statistics.ledger = self._opened(model)

    async def write(self) -> None:
        """Write all current counters.

        Raises:
            OSError: the disk is full, or the folder is gone.
        """
        (await self._read()).write(self._folder / f"{self._name}{SUFFIX}")

    async def end(self) -> None:
        """Write the last counters."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])
            with contextlib.suppress(OSError):  # the folder may be gone together with the process that made it
                await self.write()

    def _opened(self, model: Model) -> CounterFile | None:
        try:
            return CounterFile(self._folder / f"{self._name}.{self._made}{FILE_SUFFIX}", model)
        except OSError as error:
            logger.warning("what %s counts may be lost with this process: %s", model.name, error.strerror)
            return None

    async def _keep(self, state: Callable[[], object]) -> None:
        throttle = LogThrottle(logger.warning)
        before: object = None
        while True:
            await asyncio.sleep(KEEP_S)
            now = state()
            if now != before:
                before = now
                try:
                    await self.write()
                except OSError as error:
                    throttle.say("the counters cannot be kept for the other members: %s", error)


def left_counters(folder: Path, name: str) -> MemberCounters:
    """Counters of a member that has ended: exact statistics, however it ended; other counters may lack some seconds.

    Raises:
        OSError: the folder cannot be read.
    """
    kept, let_go = folder / f"{name}{SUFFIX}", folder / f"{name}{LET_GO}"
    counters = MemberCounters.from_bytes(kept.read_bytes()) if kept.exists() else MemberCounters()
    statistics, counted = pb.ModelStatisticsResponse(), list[str]()
    if let_go.exists():
        names, _, data = let_go.read_bytes().partition(b"\n")
        counted = json.loads(names)
        statistics.ParseFromString(data)
    for path in _counter_files(folder, name):
        of_model = None if path.name in counted else read_counter_file(path)
        if of_model is not None:
            add_statistics(statistics, [pb.ModelStatisticsResponse(model_stats=[of_model])], everything=True)
    if statistics.model_stats:  # they are newer
        counters.statistics = statistics
        counters.metrics = with_statistics(counters.metrics, statistics)
    counters.metrics = counters_of(counters.metrics)
    return counters


def _counter_files(folder: Path, name: str) -> list[Path]:
    return sorted(folder.glob(f"{name}.*{FILE_SUFFIX}"))


class LastingCounters:
    """Counters of a server in a cluster, which never restart while it runs. Lives on the event loop.

    Attributes:
        keeper: keeps them in files.
    """

    def __init__(self, folder: Path, name: str, core: InferenceCore) -> None:
        """Start the counters of a server without models; for `folder` and `name` see `CounterKeeper`."""
        self.keeper = CounterKeeper(folder, name, core, self._lets_go, self.counters)
        self._path = folder / f"{name}{LET_GO}"
        self._core = core
        self._leaving: dict[Model, CounterFile | None] = {}
        self._counted: list[CounterFile] = []  # counter files of unloaded models, to be removed
        self._let_go = MemberCounters()
        self._sums: dict[str, ModelState] = {}  # sums of unloaded models, by name
        self._changes = 0  # models that were unloaded, or have answered their last request

    def sums(self) -> dict[str, ModelState]:
        """Sums over all versions of each model that was ever served, by name."""
        found: dict[str, ModelState] = {}
        for name, sums in self._sums.items():
            found[name] = ModelState()
            found[name].CopyFrom(sums)
        for model in (*self._core.models(), *self._leaving):
            _add_totals(found.setdefault(model.name, ModelState()), model.statistics.totals)
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

    def _lets_go(self, model: Model, counter_file: CounterFile | None) -> None:
        self._changes += 1
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
        _add_totals(self._sums.setdefault(model.name, ModelState()), model.statistics.totals)
        if counter_file is not None:
            self._counted.append(counter_file)
        # The names mark these counter files as already counted, in case this process ends before it removes them.
        names = json.dumps([one.path.name for one in self._counted]).encode()
        hidden = self._path.with_name(f".{self._path.name}")
        try:
            hidden.write_bytes(names + b"\n" + self._let_go.statistics.SerializeToString())
            hidden.rename(self._path)
        except OSError as error:
            logger.warning("what %s has counted may be lost with this process: %s", model.name, error.strerror)
            return
        for one in self._counted:
            one.close()
        self._counted.clear()


def _add_totals(sums: ModelState, totals: Totals) -> None:
    sums.requests += totals.success.count
    sums.rows += totals.rows
    sums.failures += totals.fail.count
    sums.refusals += sum(totals.failures.get(reason, 0) for reason in REFUSALS)
    sums.queue_ns += max(0, totals.queue.ns)
    sums.compute_ns += max(0, sum(size.compute_infer.ns for size in totals.by_batch_size.values()))


def _model_counters(model: Model) -> MemberCounters:
    metrics = (metric for _, metric in model_metrics([model]))
    statistics = pb.ModelStatisticsResponse(model_stats=[model_statistics(model)])
    return MemberCounters(statistics=statistics, metrics=counters_of(metrics))
