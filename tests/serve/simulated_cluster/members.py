"""Simulated members: they load models after a virtual delay, count requests, and report like an agent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from google.protobuf import wrappers_pb2

from halfserve.protos import cluster_pb2
from halfserve.protos import inference_pb2 as pb
from halfserve.serve.engine.errors import InferenceError, NotFoundError
from halfserve.serve.fleet.control.reports import CallAnswer, ControllerLink, ModelReport, Orders, Report
from halfserve.serve.fleet.control.wanted import Order, Wanted, model_of_target, model_target
from halfserve.serve.fleet.member.fleet_commands import LOAD, READ_COUNTERS
from halfserve.serve.fleet.member.member_counters import MemberCounters
from halfserve.serve.protocol.status import status_name

RETRY_S = 0.25


@dataclass(kw_only=True)
class Counts:
    requests: int = 0
    refusals: int = 0
    queue_ns: int = 0
    compute_ns: int = 0


@dataclass(kw_only=True)
class SimulatedModel:
    done: Order | None = None
    is_served: bool = False
    is_changing: bool = False
    error: str = ""
    counts: Counts = field(default_factory=Counts)


class SimulatedStore:
    """Keeps the wanted state of each group in memory, and gives it to the members at once."""

    def __init__(self) -> None:
        self.members: list[SimulatedMember] = []  # members of all groups
        self.groups: dict[str, dict[str, Order]] = {}  # wanted states by group
        self.error: InferenceError | None = None  # raised by each change; None for none

    async def read(self, group: str) -> Wanted:
        return self.groups.get(group, {})

    async def change(self, group: str, orders: Wanted) -> None:
        if self.error is not None:
            raise self.error
        self.groups[group] = {**self.groups.get(group, {}), **orders}
        for member in self.members:
            if member.group == group:
                member.follow(orders)


class SimulatedMember:
    """Simulates one server with its agent.

    Attributes:
        mute: whether it does not report, as if its network were cut.
    """

    def __init__(
        self,
        link: ControllerLink,
        member: str,
        names: Sequence[str],
        store: SimulatedStore,
        *,
        load_s: float = 1.0,
        group: str = "",
        patterns: tuple[str, ...] = ("*",),
    ) -> None:
        self.link = link
        self.id = member
        self.group = group
        self.names = names  # models of the repository
        self.refused: dict[str, InferenceError] = {}  # errors of the models that it refuses to load from now on, by name
        self.models: dict[str, SimulatedModel] = {}  # models that it has, by name
        self.settings: dict[str, Order] = {}  # orders for settings that it has carried out, by target
        self.directory = cluster_pb2.Directory()  # the last directory received
        self.moves = 0  # number of loads begun
        self.mute = self.is_draining = False
        self.answers_counters = True  # whether it answers when it is asked for its counters
        self.answered = 0  # number of times that it did
        self._patterns = patterns
        self._store = store
        self._load_s = load_s
        self._controller = ""
        self._locks: dict[str, asyncio.Lock] = {}
        self._taken: set[str] = set()
        self._answers: dict[str, CallAnswer] = {}
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._store.members.append(self)
        plain = {model_target(name): Order(id="start", path=LOAD, request=b"") for name in self.names}
        self.follow(plain | self._store.groups.get(self.group, {}))
        self._begin(self._run())

    def follow(self, orders: Wanted) -> None:
        for target, order in orders.items():
            self._begin(self._follow(target, order))

    async def kill(self) -> None:
        self._store.members.remove(self)
        for task in tuple(self._tasks):
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

    def _counters(self) -> bytes:
        statistics = pb.ModelStatisticsResponse()
        for name, model in sorted(self.models.items()):
            statistics.model_stats.add(name=name, version="1").inference_stats.success.count = model.counts.requests
        return wrappers_pb2.BytesValue(value=MemberCounters(statistics=statistics).to_bytes()).SerializeToString()

    def _begin(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]  # a coroutine without a result
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            exchange = asyncio.ensure_future(self._exchange())
            changed = asyncio.ensure_future(self._changed.wait())
            try:
                await asyncio.wait({exchange, changed}, return_when=asyncio.FIRST_COMPLETED)
                if exchange.done():
                    self._obey(exchange.result())
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
        report = self._report()
        orders = await self.link.exchange(report)
        for given in report.answers:
            self._answers.pop(given, None)
        return orders

    def _report(self, *, has_ended: bool = False) -> Report:
        return Report(
            member=self.id,
            group=self.group,
            patterns=self._patterns,
            machine=f"machine-{self.id}",
            grpc_address=f"{self.id}:8001",
            is_draining=self.is_draining,
            models={name: self._model_report(name) for name in {*self.names, *self.models}},
            taken=frozenset({*self._taken, *self._answers}),
            answers=dict(self._answers),
            has_ended=has_ended,
            directory_version=self.directory.version,
            controller=self._controller,
        )

    def _model_report(self, name: str) -> ModelReport:
        model = self.models.get(name)
        if model is None:
            return ModelReport()
        return ModelReport(
            is_wanted=model.done is not None and model.done.path == LOAD,
            is_changing=model.is_changing,
            is_served=model.is_served,
            error=model.error,
            versions=("1",) if model.is_served else (),
            requests=model.counts.requests,
            refusals=model.counts.refusals,
            queue_ns=model.counts.queue_ns,
            compute_ns=model.counts.compute_ns,
        )

    def _obey(self, orders: Orders) -> None:
        self._controller = orders.controller
        if orders.directory is not None:
            self.directory.ParseFromString(orders.directory)
        self.is_draining = self.is_draining or orders.drain
        for target, order in orders.calls:
            self._taken.add(order.id)
            if order.path == READ_COUNTERS and not self.answers_counters:
                continue
            self._begin(self._answer(target, order))

    async def _answer(self, target: str, order: Order) -> None:
        answer = CallAnswer()
        try:
            if order.path == READ_COUNTERS:
                self.answered += 1
                answer = CallAnswer(content=self._counters())
            else:
                await self._carry_out(target, order)
        except InferenceError as error:
            answer = CallAnswer(status=status_name(error), error=str(error))
        self._taken.discard(order.id)
        self._answers[order.id] = answer
        self._changed.set()

    async def _follow(self, target: str, order: Order) -> None:
        name = model_of_target(target)
        try:
            await self._carry_out(target, order)
        except InferenceError as error:
            if name is not None:
                self.models[name].error, self.models[name].done = str(error), order
        self._changed.set()

    async def _carry_out(self, target: str, order: Order) -> None:
        async with self._locks.setdefault(target, asyncio.Lock()):
            name = model_of_target(target)
            if name is None:
                self.settings[target] = order
                return
            model = self.models.get(name)
            if name not in self.names and order.path == LOAD:
                raise NotFoundError(f"the repository has no model {name!r}")
            model = self.models.setdefault(name, SimulatedModel())
            if model.done is not None and model.done.id == order.id:
                if model.error:
                    raise self.refused[name]
                return
            if order.path != LOAD:
                model.is_served, model.done, model.error = False, order, ""
                return
            self.moves += 1
            model.is_changing = True
            await asyncio.sleep(self._load_s)
            model.is_changing = False
            if name in self.refused:
                raise self.refused[name]
            model.is_served, model.done, model.error = True, order, ""
