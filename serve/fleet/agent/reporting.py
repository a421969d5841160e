"""Reports a server's state to the controller, and passes the controller's orders on to the server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from typing import Any

from google.protobuf import empty_pb2, wrappers_pb2

from halfserve.protos.agent_pb2 import MemberState
from halfserve.serve.engine.errors import InferenceError, UnavailableError
from halfserve.serve.fleet.agent.member_folders import MemberFolders
from halfserve.serve.fleet.agent.model_orders import ModelOrders
from halfserve.serve.fleet.agent.server_process import ServerProcess
from halfserve.serve.fleet.control.autoscaling import LoadMeter
from halfserve.serve.fleet.control.reports import REPORT_S, ControllerLink, ModelReport, Orders, Report, SettingsChanges
from halfserve.serve.fleet.member.cluster_member import PUBLISH, STATE
from halfserve.serve.fleet.member.member_socket import READ_COUNTERS, MemberChannel
from halfserve.serve.transports.listener import LogThrottle

logger = logging.getLogger(__name__)

EXCHANGE_S = 5.0  # time limit for the controller's answer; it normally comes within REPORT_S
AGAIN_S = 0.2  # delay before the controller or the server is asked again after it did not answer
SOON_S = 0.01  # shortest time between two reports
LEFT_S = 2.0  # interval of checks for counters that dead servers left behind
QUERY_S = 2.0  # time limit of calls that take the server milliseconds
COUNTERS_S = 10.0  # time limit of a call that takes the server some milliseconds per model
FAREWELL_S = 5.0  # time limit for the last report; after it, the next agent on this machine reports the counters


class Reporting:
    """Report loop of one agent. Lives on the event loop.

    Attributes:
        meter: measures the server's load.
        heard_s: time of the server's last answer, on time.monotonic()'s clock.
        settled: set once the controller's first orders are carried out.
    """

    def __init__(
        self,
        names: Mapping[str, str],
        link: ControllerLink,
        server: MemberChannel,
        process: ServerProcess,
        folders: MemberFolders,
    ) -> None:
        """Prepare the reports, which `run` sends; `names` are the fields of each report that identify the server."""
        self.meter = LoadMeter()
        self.heard_s = time.monotonic()
        self.settled = asyncio.Event()
        self._names: dict[str, Any] = dict(names)
        self._link = link
        self._server = server
        self._process = process
        self._folders = folders
        self._orders = ModelOrders(server, self._tell_news)
        self._throttle = LogThrottle(logger.error)
        self._news = asyncio.Event()  # there is something to report at once
        self._drain_known = asyncio.Event()  # set once the controller knows that the server is draining
        self._is_draining = False
        self._draining: asyncio.Task[None] | None = None  # drain that the controller ordered
        self._state = MemberState(is_ready=True)
        self._answers = True  # whether the server answers
        # State exchanged with the controller last.
        self._controller = ""
        self._memory: bytes | None = None
        self._tells_memory = False
        self._counters: bytes | None = None  # counters that the controller has not taken yet
        self._counters_number = self._wanted_number = self._settings_number = 0
        self._reading: asyncio.Task[None] | None = None
        self._left: dict[str, bytes] = {}  # counters of dead servers that the controller has not taken yet
        self._looked_s = 0.0  # time of the last check for counters of dead servers

    async def run(self) -> None:
        """Report until the server has ended, and then report its last counters."""
        while self._process.code is None:
            self._news.clear()
            await self._look_at_server()
            if self._answers or self._is_leaving:  # a stuck server leaves the cluster until it answers again
                report = self._report()
                if self._answers:
                    self.meter.take(report.models, report.compute_slots, self.heard_s)
                orders = await self._exchange(report)
                if orders is not None:
                    self._has_taken(report, orders)
                    await self._follow(orders)
            await first_of(self._process.ended, timeout_s=SOON_S if self._answers else AGAIN_S)
        self._orders.close()
        if self._reading is not None:
            self._reading.cancel()
        await self._say_farewell()

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

    def _report(self) -> Report:
        if time.monotonic() - self._looked_s > LEFT_S:
            self._looked_s = time.monotonic()
            self._left |= self._folders.claim_left()
        state = self._state
        return Report(
            **self._names,
            is_draining=self._is_leaving,
            models={name: self._model(name) for name in {*state.models, *self._orders.done}},
            compute_slots=state.compute_slots,
            memory_size=state.memory_size,
            counters=self._counters,
            counters_number=self._counters_number,
            left=dict(self._left),
            directory_version=state.directory_version,
            settings_number=self._settings_number,
            controller=self._controller,
            memory=self._memory if self._tells_memory else None,
        )

    def _model(self, name: str) -> ModelReport:
        known: dict[str, Any] = {}
        model, done = self._state.models.get(name), self._orders.done.get(name)
        if model is not None:
            known = {field.name: getattr(model, field.name) for field in model.DESCRIPTOR.fields}
            known["versions"] = tuple(model.versions)
        if done is not None:
            known |= {"generation": done.generation, "error": done.error, "status": done.status}
        return ModelReport(**known)

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
        # The next controller may be a new process without any state.
        self._tells_memory = self._memory is not None
        await first_of(self._process.ended, timeout_s=AGAIN_S)
        return None

    def _has_taken(self, report: Report, orders: Orders) -> None:
        """Record that the controller has taken a report and sent these orders."""
        for member in report.left:
            self._folders.forget(member)
            del self._left[member]
        if report.counters is not None:
            self._counters = None
        if report.is_draining:
            self._drain_known.set()
        is_new, self._controller = orders.controller != self._controller, orders.controller
        self._tells_memory = is_new and self._memory is not None and report.memory is None
        if orders.memory is not None:
            self._memory = orders.memory

    async def _follow(self, orders: Orders) -> None:
        """Carry out orders, unless the controller is still recovering and does not know what the members serve."""
        if self._tells_memory:
            return
        try:
            if orders.directory is not None and self._answers:
                await self._server.call(PUBLISH, orders.directory, QUERY_S)
            if orders.settings is not None and self._answers:
                await self._take_over(orders.settings)
        except InferenceError as error:
            logger.log(logging.DEBUG if self._is_leaving else logging.WARNING, "the server does not answer: %s", error)
            return
        self._wanted_number = max(self._wanted_number, orders.counters_number)
        if self._reading is None and self._wanted_number > self._counters_number:
            self._reading = asyncio.create_task(self._read_counters())
        if orders.drain and self._draining is None:
            self._draining = asyncio.create_task(self.drain())  # the drain itself waits until the controller knows
        if orders.drain or self._is_draining:
            return
        self._orders.follow(orders.models)
        if (self._state.directory_version or orders.directory is not None) and self._orders.are_carried_out:
            self.settled.set()

    async def _take_over(self, settings: SettingsChanges) -> None:
        """Apply the cluster's log and trace settings to the server.

        Raises:
            UnavailableError: the server does not answer.
        """
        for path, request in settings.changes:
            try:
                await self._server.call(path, request, QUERY_S)
            except UnavailableError:
                raise
            except InferenceError as error:  # its start options may differ from those of the member that accepted the setting
                logger.warning("a setting of the cluster cannot be taken over: %s", error)
        self._settings_number = settings.number

    async def _read_counters(self) -> None:
        """Read the counters that the controller requested. Reports continue meanwhile: a thousand models take some seconds."""
        try:
            while self._counters_number < self._wanted_number:
                number = self._wanted_number
                if self._answers:
                    answer = await self._server.ask(READ_COUNTERS, empty_pb2.Empty(), wrappers_pb2.BytesValue, COUNTERS_S)
                    counters = bytes(answer.value)
                else:  # the server is about to end, and has written its counters to the folder
                    counters = await asyncio.to_thread(self._folders.own_counters)
                self._counters, self._counters_number = counters, number
                self._tell_news()
        except InferenceError as error:
            logger.warning("the server does not tell its agent what it has counted: %s", error)
        finally:
            self._reading = None

    async def _say_farewell(self) -> None:
        """Report the last counters of the server that has ended, or leave them to another agent."""
        counters = await asyncio.to_thread(self._folders.own_counters)
        report = Report(**self._names, counters=counters, has_ended=True, controller=self._controller)
        is_known = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                while not is_known:
                    try:
                        await self._link.exchange(report)
                        is_known = True
                    except Exception as error:  # noqa: BLE001  (the counters are kept, whatever the controller does)
                        if not isinstance(error, ConnectionError):
                            self._throttle.say("the controller does not take the last report: %s", error)
                        await asyncio.sleep(AGAIN_S)
        if not is_known:
            logger.warning("the controller does not know what this server has counted; the next agent here will tell it")
        self._folders.close(keep_own=not is_known)


async def first_of(*events: asyncio.Event, timeout_s: float | None = None, task: asyncio.Future[Any] | None = None) -> None:
    """Wait until an event is set, the task is done, or the timeout expires; the task is not cancelled."""
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(
            [*waiting, *([] if task is None else [task])], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
    finally:
        for one in waiting:
            one.cancel()
