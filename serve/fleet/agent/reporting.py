"""Reports a server's state to the controller, and passes the controller's orders on to the server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from google.protobuf import empty_pb2

from halfserve.protos.agent_pb2 import MemberState
from halfserve.serve.engine.errors import InferenceError
from halfserve.serve.fleet.agent.server_orders import ServerOrders
from halfserve.serve.fleet.agent.server_process import ServerProcess
from halfserve.serve.fleet.control.autoscaling import LoadMeter
from halfserve.serve.fleet.control.reports import REPORT_S, CallAnswer, ControllerLink, ModelReport, Orders, Report
from halfserve.serve.fleet.control.wanted import Order, Wanted
from halfserve.serve.fleet.member.cluster_member import PUBLISH, STATE
from halfserve.serve.fleet.member.member_socket import MemberChannel
from halfserve.serve.protocol.status import status_name
from halfserve.serve.transports.listener import LogThrottle

logger = logging.getLogger(__name__)

EXCHANGE_S = 5.0  # time limit for the controller's answer; it normally comes within REPORT_S
AGAIN_S = 0.2  # delay before the controller or the server is asked again after it did not answer
SOON_S = 0.01  # shortest time between two reports
QUERY_S = 2.0  # time limit of calls that take the server milliseconds
FAREWELL_S = 2.0  # time limit for the last report; without it, the controller notices the end by the lease


class Reporting:
    """Report loop of one agent. Lives on the event loop.

    Attributes:
        meter: measures the server's load.
        heard_s: time of the server's last answer, on time.monotonic()'s clock.
        settled: set once the wanted state is carried out, and the server has the directory.
    """

    def __init__(
        self,
        about: Callable[..., Report],
        patterns: Sequence[str],
        link: ControllerLink,
        server: MemberChannel,
        process: ServerProcess,
    ) -> None:
        """Prepare the reports, which `run` sends.

        Args:
            about: makes a report; it has the fields that identify the server.
            patterns: names, or patterns of names, of the models that the server shall have.
            link: connection to the controller.
            server: connection to the server.
            process: process of the server.
        """
        self.meter = LoadMeter()
        self.heard_s = time.monotonic()
        self.settled = asyncio.Event()
        self._about = about
        self._patterns = patterns
        self._link = link
        self._server = server
        self._process = process
        self._orders = ServerOrders(server, self._tell_news)
        self._throttle = LogThrottle(logger.error)
        self._news = asyncio.Event()  # there is something to report at once
        self._drain_known = asyncio.Event()  # set once the controller knows that the server is draining
        self._is_draining = False
        self._draining: asyncio.Task[None] | None = None  # drain that the controller ordered
        self._state = MemberState(is_ready=True)
        self._answers = True  # whether the server answers
        self._controller = ""
        self._taken: dict[str, asyncio.Task[None]] = {}  # calls of the controller that are being carried out, by id
        self._answered: dict[str, CallAnswer] = {}  # answers that the controller has not taken yet

    async def begin(self, wanted: Wanted) -> None:
        """Have the server serve the models of the repository as the wanted state says.

        Raises:
            InferenceError: the server does not answer.
        """
        self._state = await self._server.ask(STATE, empty_pb2.Empty(), MemberState, QUERY_S)
        # What the server has at its start is pinned, or loaded by requests.
        missing = [name for name, model in self._state.models.items() if self._may_have(name) and not model.is_served]
        self._orders.begin(missing, wanted)

    def follow(self, wanted: Wanted) -> None:
        """Carry out what is new in the wanted state."""
        if not self._is_draining:
            self._orders.follow(wanted)

    async def run(self) -> None:
        """Report until the server has ended."""
        while self._process.code is None:
            self._news.clear()
            answers = dict(self._answered)  # taken before the state is read, which then shows what they changed
            await self._look_at_server()
            if self._answers or self._is_leaving:  # a stuck server leaves the cluster until it answers again
                report = self._report(answers)
                if self._answers:
                    self.meter.take(report.models, report.compute_slots, self.heard_s)
                self._orders.retry()
                orders = await self._exchange(report)
                if orders is not None:
                    self._has_taken(report, orders)
                    await self._obey(orders)
            await first_of(self._process.ended, timeout_s=SOON_S if self._answers else AGAIN_S)
        self._orders.close()
        for task in self._taken.values():
            task.cancel()
        with contextlib.suppress(Exception):
            async with asyncio.timeout(FAREWELL_S):
                await self._link.exchange(self._about(has_ended=True, controller=self._controller))

    async def drain(self) -> None:
        """Have the server refuse new requests, and end once the accepted ones are answered."""
        if self._is_draining:
            return
        self._is_draining = True
        self._tell_news()
        # Clients must see the member leave the directory before it refuses requests.
        await first_of(self._drain_known, self._process.ended, timeout_s=2 * REPORT_S)
        self._process.terminate()

    @property
    def _is_leaving(self) -> bool:
        """Whether the server has stopped taking requests for good, because it was told to or lost its device."""
        return self._is_draining or not self._state.is_ready

    def _may_have(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._patterns)

    def _tell_news(self) -> None:
        self._news.set()

    async def _look_at_server(self) -> None:
        try:
            self._state = await self._server.ask(STATE, empty_pb2.Empty(), MemberState, QUERY_S)
        except InferenceError as error:
            logger.debug("the server does not answer: %s", error)
            self._answers = False
            return
        self._answers, self.heard_s = True, time.monotonic()

    def _report(self, answers: dict[str, CallAnswer]) -> Report:
        models = self._state.models
        offered = {name for name, model in models.items() if model.versions or self._may_have(name)}
        return self._about(
            is_draining=self._is_leaving,
            models={name: self._model(name) for name in {*offered, *self._orders.models}},
            compute_slots=self._state.compute_slots,
            taken=frozenset({*self._taken, *self._answered}),
            answers=answers,
            directory_version=self._state.directory_version,
            controller=self._controller,
        )

    def _model(self, name: str) -> ModelReport:
        orders, model = self._orders, self._state.models.get(name)
        if model is None:
            return ModelReport(is_wanted=orders.wants(name), is_changing=orders.is_changing(name), error=orders.error(name))
        return ModelReport(
            is_wanted=orders.wants(name),
            is_changing=orders.is_changing(name),
            is_served=model.is_served,
            error=orders.error(name),
            versions=tuple(model.versions),
            requests=model.requests,
            refusals=model.refusals,
            queue_ns=model.queue_ns,
            compute_ns=model.compute_ns,
        )

    async def _exchange(self, report: Report) -> Orders | None:
        """Send a report, and return the orders; None without an answer, or if something newer must be reported."""
        exchange = asyncio.ensure_future(self._link.exchange(report))
        try:
            await first_of(self._news, self._process.ended, timeout_s=EXCHANGE_S, task=exchange)
            if exchange.done():
                return exchange.result()
            if self._news.is_set() or self._process.code is not None:
                return None
        except ConnectionError as error:
            logger.debug("the controller cannot be reached: %s", error)
        except Exception as error:  # noqa: BLE001  (whatever the controller does, the server serves on)
            self._throttle.say("the controller does not take the reports of this server: %s: %s", type(error).__name__, error)
        finally:
            exchange.cancel()
        await first_of(self._process.ended, timeout_s=AGAIN_S)
        return None

    def _has_taken(self, report: Report, orders: Orders) -> None:
        """Record that the controller has taken a report and sent these orders."""
        for given in report.answers:
            self._answered.pop(given, None)
        if report.is_draining:
            self._drain_known.set()
        self._controller = orders.controller

    async def _obey(self, orders: Orders) -> None:
        try:
            if orders.directory is not None and self._answers:
                await self._server.call(PUBLISH, orders.directory, QUERY_S)
        except InferenceError as error:
            logger.log(logging.DEBUG if self._is_leaving else logging.WARNING, "the server does not answer: %s", error)
            return
        for target, order in orders.calls:
            if order.id not in self._taken and order.id not in self._answered:
                self._taken[order.id] = asyncio.create_task(self._answer(target, order))
        if orders.drain and self._draining is None:
            self._draining = asyncio.create_task(self.drain())  # the drain itself waits until the controller knows
        if (self._state.directory_version or orders.directory is not None) and self._orders.are_carried_out:
            self.settled.set()

    async def _answer(self, target: str, order: Order) -> None:
        """Carry out a call of the controller, and report the answer."""
        try:
            self._answered[order.id] = CallAnswer(content=await self._orders.carry_out(target, order))
        except InferenceError as error:
            self._answered[order.id] = CallAnswer(status=status_name(error), error=str(error))
        finally:
            del self._taken[order.id]
            self._tell_news()


async def first_of(*events: asyncio.Event, timeout_s: float | None = None, task: asyncio.Future[Orders] | None = None) -> None:
    """Wait until an event is set, the task is done, or the timeout expires; the task is not cancelled."""
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    awaited: list[asyncio.Future[Any]] = [*waiting, *([] if task is None else [task])]
    try:
        await asyncio.wait(awaited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in waiting:
            one.cancel()
