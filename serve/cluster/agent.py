"""The agent beside each server of a cluster: starts the server, reports to the controller, and carries out its orders."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import time
from collections.abc import Coroutine
from typing import Any

from halfserve.protos.agent_pb2 import Answer, MemberState, Question
from halfserve.serve.cluster.member_folders import MemberFolders
from halfserve.serve.cluster.model_orders import ModelOrders
from halfserve.serve.cluster.options import AgentOptions
from halfserve.serve.cluster.reports import REPORT_S, ControllerLink, ModelReport, Orders, Report
from halfserve.serve.cluster.server_link import ServerLink
from halfserve.serve.cluster.server_load import Load, LoadMeter
from halfserve.serve.cluster.server_process import AgentError, Ports, ServerProcess
from halfserve.serve.engine.errors import InferenceError, UnavailableError
from halfserve.serve.members.agent_questions import METRICS as METRICS_QUESTION
from halfserve.serve.protocol.status import Code, status_of
from halfserve.serve.supervisor.handover import GRPC, HTTP, METRICS
from halfserve.serve.transports.listening import address_of

__all__ = ["Agent", "AgentError", "AgentOptions", "Load"]

logger = logging.getLogger(__name__)

EXCHANGE_S = 5.0  # for the controller's answer, which comes within REPORT_S
AGAIN_S = 0.2  # before the controller is asked again, where it is not there
LEFT_S = 2.0  # between two looks for what dead servers have left
STUCK_S = 30.0  # a server that has not answered its agent for so long is given up
FAREWELL_S = 5.0  # for the controller to take the last report; then the next agent on this machine finds the counters
NO_CONTROLLER = (
    "the cluster's controller cannot be reached now, so what concerns all members is not known; inference goes on, ask again "
    "in a moment"
)


class Agent:
    """One server, and its place in the cluster. Lives on one event loop.

    Attributes:
        member: id of the server process in the cluster.
        address: HOST:PORT of gRPC, as clients reach it; "" before `start`.
        http_address: HOST:PORT of REST; "" before `start`, and with --no-http.
        metrics_address: HOST:PORT of the metrics; "" likewise.
    """

    def __init__(self, options: AgentOptions, link: ControllerLink) -> None:
        """An agent without a server."""
        self.member = secrets.token_hex(6)
        self.address = self.http_address = self.metrics_address = ""
        self._options = options
        self._link = link
        self._folders: MemberFolders | None = None
        self._process: ServerProcess | None = None
        self._server: ServerLink | None = None
        self._orders: ModelOrders | None = None
        self._meter = LoadMeter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._news = asyncio.Event()  # there is something to report at once
        self._settled = asyncio.Event()  # the first orders are carried out
        self._reported = asyncio.Event()  # the controller has the present report
        self._over = asyncio.Event()  # the last report was made, or given up
        self._heard_s = 0.0  # when the server answered last
        self._is_draining = False
        self._state = MemberState(is_ready=True)
        # What the controller was told last, and has told.
        self._controller = ""
        self._memory: bytes | None = None
        self._tells_memory = False
        self._figures: bytes | None = None  # not taken by the controller yet
        self._figures_number = 0
        self._left: dict[str, bytes] = {}  # likewise
        self._looked_s = 0.0  # for what dead servers have left

    @property
    def pid(self) -> int:
        """Of the server process; 0 before it is started."""
        return 0 if self._process is None else self._process.pid

    @property
    def load(self) -> Load:
        """How busy the server was lately."""
        return self._meter.load

    async def start(self) -> None:
        """Start the server, and report until `stop`.

        Returns once the server has carried out the controller's first orders: it serves the models that it shall serve. While
        the controller cannot be reached, this waits.

        Raises:
            AgentError: the server cannot be started, or has ended.
        """
        options = self._options
        options.check()
        self._folders = MemberFolders(options.folder, options.cluster, self.member)
        names = (GRPC,) if "--no-http" in options.arguments else (GRPC, HTTP, METRICS)
        ports = Ports(options.host, options.first_port, names)
        host = options.advertised_host or options.host
        self.address, self.http_address, self.metrics_address = (
            address_of(host, ports[name]) if name in names else "" for name in (GRPC, HTTP, METRICS)
        )
        self._process = process = ServerProcess()
        await process.start(options.path, options.arguments, options.host, ports, self._folders.own, self.member)
        self._server = ServerLink(self._folders.own)
        self._orders = ModelOrders(self._server, self._has_news)
        self._heard_s = time.monotonic()
        self._task(self._report(self._folders, self._server, self._orders, process))
        self._task(self._answer_questions(self._server))
        await _first_of(self._settled, process.ended)
        self.check()

    def check(self) -> None:
        """Check that the server runs.

        Raises:
            AgentError: it has ended, or answers no more.
        """
        if self._process is not None and self._process.code is not None:
            raise AgentError(f"the server of member {self.member} has ended: {self._process.why()}")
        silent_s = time.monotonic() - self._heard_s
        if self._server is not None and silent_s > STUCK_S:
            raise AgentError(f"the server of member {self.member} has not answered for {silent_s:.0f} s")

    async def stop(self) -> None:
        """Leave the cluster: take no new requests, answer those taken, end the server, and report its last counters.

        Returns when all that is done; how long it may take, the server's --lame-duck-seconds and --drain-seconds say. Safe to
        call twice, and after a failed start.
        """
        self._drain()
        process = self._process
        if process is not None and process.pid:
            if self._server is None or process.code is not None:
                process.terminate()
            await process.ended.wait()
        if self._server is not None:
            await self._over.wait()
        elif self._folders is not None:
            self._folders.close(keep_own=False)
            self._folders = None
        for task in self._tasks:
            task.cancel()
        if self._server is not None:
            await self._server.close()

    def _drain(self) -> None:
        """Tell the controller, and have the server end."""
        if not self._is_draining:
            self._is_draining = True
            self._has_news()
            if self._server is not None and self._process is not None:
                self._task(self._terminate(self._process))

    async def _terminate(self, process: ServerProcess) -> None:
        self._reported.clear()
        with contextlib.suppress(TimeoutError):  # clients see that it leaves before it refuses them
            async with asyncio.timeout(2 * REPORT_S):
                await self._reported.wait()
        process.terminate()

    # Reports.

    async def _report(self, folders: MemberFolders, server: ServerLink, orders: ModelOrders, process: ServerProcess) -> None:
        """Report until the server has ended."""
        while process.code is None:
            self._news.clear()
            try:
                self._state = await server.state()
            except InferenceError as error:
                logger.debug("the server does not answer: %s", error)
                if not self._is_leaving:  # it is stuck: no member until it answers again
                    await _first_of(process.ended, timeout_s=AGAIN_S)
                    continue
            else:
                self._heard_s = time.monotonic()
                self._meter.take(self._state, self._heard_s)
            report = self._make_report(folders, orders)
            given = await self._exchange(report, process)
            if given is not None:
                await self._follow(given, report, server, orders)
        orders.close()
        await self._say_farewell(folders)
        self._over.set()

    @property
    def _is_leaving(self) -> bool:
        """Whether the server takes no new requests for ever, as it was told to, or lost its device."""
        return self._is_draining or not self._state.is_ready

    def _make_report(self, folders: MemberFolders, orders: ModelOrders) -> Report:
        if time.monotonic() - self._looked_s > LEFT_S:
            self._looked_s = time.monotonic()
            self._left |= folders.claim_left()
        state = self._state
        models = {}
        for name in {*state.models, *orders.done}:
            model, done = state.models.get(name), orders.done.get(name)
            counted: dict[str, Any] = {}
            if model is not None:
                counted = {field.name: getattr(model, field.name) for field in model.DESCRIPTOR.fields}
                counted["versions"] = tuple(model.versions)
            if done is not None:
                counted |= {"generation": done.generation, "error": done.error, "status": done.status}
            models[name] = ModelReport(**counted)
        return Report(
            **self._names(),
            is_draining=self._is_leaving,
            models=models,
            compute_slots=state.compute_slots,
            memory_size=state.memory_size,
            figures=self._figures,
            figures_number=self._figures_number,
            left=dict(self._left),
            directory_version=state.directory_version,
            controller=self._controller,
            memory=self._memory if self._tells_memory else None,
        )

    def _names(self) -> dict[str, Any]:
        return {
            "member": self.member,
            "machine": self._options.machine or socket.gethostname(),
            "grpc_address": self.address,
            "http_address": self.http_address,
        }

    async def _exchange(self, report: Report, process: ServerProcess) -> Orders | None:
        """Report, and return the orders; None if there are none, or something newer is to be reported."""
        exchange = asyncio.ensure_future(self._link.exchange(report))
        try:
            await _first_of(self._news, process.ended, timeout_s=EXCHANGE_S, task=exchange)
            if not exchange.done():
                if not self._news.is_set() and process.code is None:
                    self._has_lost_controller()
                return None
            orders = exchange.result()
        except ConnectionError as error:
            logger.debug("the controller cannot be reached: %s", error)
            self._has_lost_controller()
            await _first_of(process.ended, timeout_s=AGAIN_S)
            return None
        finally:
            exchange.cancel()
        return orders

    def _has_lost_controller(self) -> None:
        """The next one may be another one, which knows nothing."""
        self._tells_memory = self._memory is not None

    async def _follow(self, given: Orders, report: Report, server: ServerLink, orders: ModelOrders) -> None:
        """Carry out orders, which are the answer to this report."""
        is_new = given.controller != self._controller
        self._controller = given.controller
        self._tells_memory = is_new and self._memory is not None and report.memory is None
        self._has_taken(report)
        if given.memory is not None:
            self._memory = given.memory
        if self._tells_memory:  # a controller that does not know what it shall have the members serve
            return
        try:
            if given.directory is not None:
                await server.publish(given.directory)
            if given.figures_number > self._figures_number:
                self._figures, self._figures_number = await server.figures(), given.figures_number
        except InferenceError as error:
            logger.warning("the server does not answer its agent: %s", error)
        if given.drain:
            self._drain()
        if not self._is_draining:
            orders.follow(given.models)
            if (self._state.directory_version or given.directory is not None) and orders.are_carried_out:
                self._settled.set()

    def _has_taken(self, report: Report) -> None:
        """The controller knows what this report says."""
        if self._folders is not None:
            for member in report.left:
                self._folders.forget(member)
                del self._left[member]
        if report.figures is not None:
            self._figures = None
        if report.is_draining:
            self._reported.set()

    async def _say_farewell(self, folders: MemberFolders) -> None:
        """Report the counters of the server that has ended, or leave them to another agent."""
        figures = await asyncio.to_thread(folders.own_figures)
        report = Report(**self._names(), figures=figures, has_ended=True, controller=self._controller)
        is_known = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                while not is_known:
                    try:
                        await self._link.exchange(report)
                        is_known = True
                    except ConnectionError:
                        await asyncio.sleep(AGAIN_S)
        if not is_known:
            logger.warning("the controller does not know what this server has counted; the next agent here will tell it")
        folders.close(keep_own=not is_known)

    # Questions of the server.

    async def _answer_questions(self, server: ServerLink) -> None:
        while self._process is not None and self._process.code is None:
            try:
                async for question in server.questions():
                    self._task(self._answer(server, question))
            except InferenceError as error:
                logger.debug("the server asks no more: %s", error)
            await asyncio.sleep(AGAIN_S)

    async def _answer(self, server: ServerLink, question: Question) -> None:
        answer = Answer(number=question.number)
        try:
            if question.path == METRICS_QUESTION:
                answer.answer, answer.text = await self._link.metrics()
            else:
                answer.answer = await self._link.call(question.path, question.request)
        except ConnectionError:
            answer.code, answer.text = Code.UNAVAILABLE, NO_CONTROLLER
        except Exception as error:
            if not isinstance(error, InferenceError):
                logger.exception("%s cannot be answered for the cluster", question.path)
            status = status_of(error)
            answer.code, answer.text = status.code, status.details
        with contextlib.suppress(UnavailableError):  # the server is gone
            await server.answer(answer)

    def _has_news(self) -> None:
        self._news.set()

    def _task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("the agent failed", exc_info=task.exception())


async def _first_of(*events: asyncio.Event, timeout_s: float | None = None, task: asyncio.Future[Any] | None = None) -> None:
    """Wait until one of the events is set, the task is done, or the time is over; the task goes on."""
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(
            [*waiting, *([] if task is None else [task])], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
    finally:
        for one in waiting:
            one.cancel()
