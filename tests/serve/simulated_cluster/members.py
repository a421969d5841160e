"""Simulated members: they load models after a virtual delay, count requests, and report like an agent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from halfserve.protos import cluster_pb2
from halfserve.protos import inference_pb2 as pb
from halfserve.serve.fleet.control.reports import ControllerLink, ModelOrder, ModelReport, Orders, Report, SettingsChanges
from halfserve.serve.fleet.member.member_counters import MemberCounters, with_statistics

RETRY_S = 0.25


@dataclass(kw_only=True)
class Refusal:
    """Reason why a simulated model does not load."""

    status: str
    text: str


@dataclass(kw_only=True)
class Counts:
    """Counters of a simulated member for one model."""

    requests: int = 0
    failures: int = 0
    refusals: int = 0
    queue_ns: int = 0
    compute_ns: int = 0


@dataclass(kw_only=True)
class SimulatedModel:
    """A model at one member; `is_served` once it is loaded."""

    generation: int = 0
    is_served: bool = False
    refusal: Refusal | None = None
    loading: asyncio.Task[None] | None = None
    counts: Counts = field(default_factory=Counts)


class SimulatedMember:
    """Simulates one server with its agent.

    Attributes:
        sizes: sizes of the repository's models in bytes, by name.
        refused: models that it refuses to load from now on.
        models: models that it has, by name.
        directory: the last directory received.
        settings: the last log and trace settings received.
        largest: largest total size of models served at a time, in bytes.
        moves: number of loads begun.
        mute: whether it does not report, as if its network were cut.
        answered: number of the last request for counters that it answered.
        answers_counters: whether it reports counters when asked.
    """

    def __init__(
        self, link: ControllerLink, member: str, sizes: Mapping[str, int], *, load_s: float = 1.0, memory_size: int = 0
    ) -> None:
        self.link = link
        self.id = member
        self.sizes = dict(sizes)
        self.refused: dict[str, Refusal] = {}
        self.models: dict[str, SimulatedModel] = {}
        self.directory = cluster_pb2.Directory()
        self.settings = SettingsChanges(number=0, changes=())
        self.largest = 0
        self.moves = 0
        self.mute = False
        self.answers_counters = True
        self.is_draining = False
        self.memory: bytes | None = None
        self.left: dict[str, bytes] = {}
        self._load_s = load_s
        self._memory_size = memory_size
        self._controller = ""
        self._is_new_controller = False
        self._asked = 0
        self.answered = 0
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def kill(self) -> None:
        """End without a last report."""
        tasks = [one.loading for one in self.models.values() if one.loading is not None]
        for task in [*tasks, self._task]:
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    async def end(self) -> None:
        """End with a last report."""
        await self.kill()
        await self.link.exchange(self._report(has_ended=True))

    def serves(self, name: str) -> bool:
        return name in self.models and self.models[name].is_served

    def count(self, name: str, requests: int = 1, *, compute_s: float = 0.0, queue_s: float = 0.0, refusals: int = 0) -> None:
        """Count requests for a model that it serves as answered."""
        counts = self.models[name].counts
        counts.requests += requests
        counts.refusals += refusals
        counts.compute_ns += round(compute_s * 1e9)
        counts.queue_ns += round(queue_s * 1e9)

    def counters(self) -> bytes:
        statistics = pb.ModelStatisticsResponse()
        for name, model in sorted(self.models.items()):
            counts, one = model.counts, statistics.model_stats.add(name=name, version="1")
            one.inference_count = counts.requests
            one.inference_stats.success.count = counts.requests
            one.inference_stats.success.ns = counts.queue_ns + counts.compute_ns
            one.inference_stats.queue.ns, one.inference_stats.queue.count = counts.queue_ns, counts.requests
            one.inference_stats.compute_infer.ns = counts.compute_ns
            one.inference_stats.compute_infer.count = counts.requests
        return MemberCounters(statistics=statistics, metrics=with_statistics([], statistics)).to_bytes()

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            exchange = asyncio.ensure_future(self._exchange())
            changed = asyncio.ensure_future(self._changed.wait())
            try:
                await asyncio.wait({exchange, changed}, return_when=asyncio.FIRST_COMPLETED)
                if exchange.done():
                    self._carry_out(exchange.result())
            except ConnectionError:
                await asyncio.sleep(RETRY_S)
            finally:
                exchange.cancel()
                changed.cancel()
                await asyncio.wait({exchange, changed})

    async def _exchange(self) -> Orders:
        if self.mute:
            await asyncio.sleep(RETRY_S)
            raise ConnectionError("the network is cut")
        return await self.link.exchange(self._report())

    def _report(self, *, has_ended: bool = False) -> Report:
        with_counters = has_ended or (self._asked > self.answered and self.answers_counters)
        if with_counters:
            self.answered = self._asked
        left, self.left = self.left, {}
        return Report(
            member=self.id,
            machine=f"machine-{self.id}",
            grpc_address=f"{self.id}:8001",
            is_draining=self.is_draining,
            models={name: self._model_report(name) for name in self.sizes},
            memory_size=self._memory_size,
            counters=self.counters() if with_counters else None,
            counters_number=self.answered,
            has_ended=has_ended,
            left=left,
            directory_version=self.directory.version,
            settings_number=self.settings.number,
            controller=self._controller,
            memory=self.memory if self._is_new_controller else None,
        )

    def _model_report(self, name: str) -> ModelReport:
        model = self.models.get(name)
        if model is None:
            return ModelReport(size=self.sizes[name])
        counts = model.counts
        return ModelReport(
            generation=model.generation,
            is_served=model.is_served,
            error=model.refusal.text if model.refusal else "",
            status=model.refusal.status if model.refusal else "",
            versions=("1",) if model.is_served else (),
            size=self.sizes[name],
            requests=counts.requests,
            rows=counts.requests,
            failures=counts.failures,
            refusals=counts.refusals,
            queue_ns=counts.queue_ns,
            compute_ns=counts.compute_ns,
        )

    def _carry_out(self, orders: Orders) -> None:
        self._is_new_controller = orders.controller != self._controller
        self._controller = orders.controller
        if orders.directory is not None:
            self.directory.ParseFromString(orders.directory)
        self.settings = orders.settings or self.settings
        if orders.memory is not None:
            self.memory = orders.memory
        self._asked = max(self._asked, orders.counters_number)
        self.is_draining = self.is_draining or orders.drain
        for name, order in orders.models.items():
            model = self.models.setdefault(name, SimulatedModel())
            if model.generation != order.generation and model.loading is None:
                model.loading = asyncio.get_running_loop().create_task(self._load(name, model, order))
        for name, model in self.models.items():
            if name not in orders.models:
                model.is_served, model.generation, model.refusal = False, 0, None

    async def _load(self, name: str, model: SimulatedModel, order: ModelOrder) -> None:
        if not order.request:
            raise RuntimeError(f"{self.id} cannot carry out an order without a request: {name} {order}")
        self.moves += 1
        await asyncio.sleep(self._load_s)
        model.loading, model.generation, model.refusal = None, order.generation, self.refused.get(name)
        model.is_served = model.is_served or model.refusal is None
        self.sizes.setdefault(name, 0)
        self.largest = max(self.largest, sum(self.sizes[one] for one in self.models if self.serves(one)))
        self._changed.set()
