"""The agent beside each server of a cluster: starts the server, reports to the controller, and carries out its orders."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import socket
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from halfserve.serve.engine.errors import InferenceError
from halfserve.serve.fleet.agent.reporting import Reporting, first_of
from halfserve.serve.fleet.agent.server_process import AgentError, AgentOptions, Ports, ServerProcess
from halfserve.serve.fleet.control.autoscaling import MemberLoad
from halfserve.serve.fleet.control.reports import ControllerLink, Report
from halfserve.serve.fleet.control.wanted import Wanted
from halfserve.serve.fleet.member.cluster_member import AGENT, SOCKET
from halfserve.serve.fleet.member.handover import GRPC, HTTP, METRICS
from halfserve.serve.fleet.member.member_socket import CHANNEL_OPTIONS, SUFFIX, MemberChannel
from halfserve.serve.protocol.status import Code, Status, status_of
from halfserve.serve.transports.listening import address_of

logger = logging.getLogger(__name__)

LONGEST = 107 - len(f"/{SOCKET}{SUFFIX}")  # most bytes of a folder's path: the path of a Unix socket in it may have 107
STUCK_S = 30.0  # a server whose agent gets no answer for this long is considered stuck
STATUSES = {code.value[0]: code for code in grpc.StatusCode}
NO_CONTROLLER = (
    "the cluster's controller cannot be reached now, so what concerns all members is not known; inference goes on, ask again "
    "in a moment"
)


class Agent:
    """Starts and supervises one server, and represents it in the cluster. Lives on one event loop.

    Attributes:
        member: id of the server process in the cluster.
        address: HOST:PORT of gRPC, as clients reach it; "" before `start`.
        http_address: HOST:PORT of REST; "" before `start`, and with --no-http.
        metrics_address: HOST:PORT of the metrics; "" before `start`.
    """

    def __init__(self, options: AgentOptions, link: ControllerLink) -> None:
        """Create an agent whose server is not started yet."""
        self.member = secrets.token_hex(6)
        self.address = self.http_address = self.metrics_address = ""
        self._options = options
        self._link = link
        self._folder: Path | None = None
        self._process: ServerProcess | None = None
        self._server: MemberChannel | None = None
        self._socket: AgentSocket | None = None
        self._reporting: Reporting | None = None
        self._reports: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """Process id of the server; 0 before it is started."""
        return 0 if self._process is None else self._process.pid

    @property
    def load(self) -> MemberLoad:
        """Load of the server over the last seconds."""
        return MemberLoad() if self._reporting is None else self._reporting.meter.load

    async def start(self) -> None:
        """Start the server, which has no models yet.

        Raises:
            AgentError: the server cannot be started, or ended during the start.
        """
        options = self._options
        names = (GRPC,) if "--no-http" in options.arguments else (GRPC, HTTP, METRICS)
        self._folder = folder = _shared_folder(options.folder)
        ports = Ports(options.host, options.first_port, names)
        host = options.advertised_host or options.host
        self.address, self.http_address, self.metrics_address = (
            address_of(host, ports[name]) if name in names else "" for name in (GRPC, HTTP, METRICS)
        )
        self._socket = AgentSocket(folder, self._link)
        await self._socket.start()
        self._process = process = ServerProcess()
        await process.start(options.path, options.arguments, options.host, ports, folder, self.member)
        self._server = MemberChannel(folder, SOCKET)
        about = partial(
            Report,
            member=self.member,
            group=options.group,
            patterns=options.patterns,
            machine=options.machine or socket.gethostname(),
            grpc_address=self.address,
            http_address=self.http_address,
        )
        self._reporting = Reporting(about, options.patterns, self._link, self._server, process)

    async def serve(self, wanted: Wanted) -> None:
        """Have the server do what the wanted state of its group says, and report until `stop`.

        Returns once the server does so, and knows the other members. Waits for as long as the controller cannot be reached.

        Raises:
            AgentError: the server has ended.
        """
        reporting, process = self._reporting, self._process
        if reporting is None or process is None:
            raise AgentError(f"the server of member {self.member} has not been started")
        try:
            await reporting.begin(wanted)
        except InferenceError as error:
            raise AgentError(f"the server of member {self.member} does not answer: {error}") from None
        self._reports = asyncio.create_task(reporting.run())
        self._reports.add_done_callback(_log_failure)
        await first_of(reporting.settled, process.ended)
        self.check()

    def follow(self, wanted: Wanted) -> None:
        """Have the server carry out what is new in the wanted state. Returns at once, and raises no error of the server."""
        if self._reporting is not None:
            self._reporting.follow(wanted)

    def check(self) -> None:
        """Check that the server runs and that the agent still reports.

        Raises:
            AgentError: the server has ended or stopped answering, or the agent stopped reporting.
        """
        if self._process is not None and self._process.code is not None:
            raise AgentError(f"the server of member {self.member} has ended: {self._process.why()}")
        if self._reporting is None or self._reports is None:
            return
        if self._reports.done():
            raise AgentError(f"the agent of member {self.member} reports no more; its log says why")
        silent_s = time.monotonic() - self._reporting.heard_s
        if silent_s > STUCK_S:
            raise AgentError(f"the server of member {self.member} has not answered for {silent_s:.0f} s")

    async def stop(self) -> None:
        """Leave the cluster: refuse new requests, finish the accepted ones, and end the server.

        Returns when all of this is done; the server's --lame-duck-seconds and --drain-seconds limit the time. Safe to call
        twice, and after a failed start.
        """
        if self._reporting is not None and self._reports is not None:
            await self._reporting.drain()
            await asyncio.wait([self._reports])
        elif self._process is not None:
            await self._process.stop()
        if self._socket is not None:
            await self._socket.stop()
        if self._server is not None:
            await self._server.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _shared_folder(parent: Path | None) -> Path:
    """Create the folder that an agent and its server share; only this user can access it.

    Raises:
        AgentError: the folder cannot be made.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix="halfserve-member-", dir=parent))
    except OSError as error:
        raise AgentError(
            f"{error.filename or tempfile.gettempdir()}: {error.strerror}; set TMPDIR to a folder of this user"
        ) from None
    if len(os.fsencode(folder)) > LONGEST:
        folder.rmdir()
        raise AgentError(f"{folder} has no room for a Unix socket's name; set TMPDIR to a shorter path")
    return folder


class AgentSocket(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpcio ships no types
    """Unix socket at which a server asks what concerns the whole cluster. Lives on the event loop."""

    def __init__(self, folder: Path, link: ControllerLink) -> None:
        """Prepare a socket in the folder that the agent shares with its server; the controller gives the answers."""
        self._link = link
        self._server = grpc.aio.server(handlers=[self], options=CHANNEL_OPTIONS)
        self._server.add_insecure_port(f"unix:{folder / AGENT}{SUFFIX}")

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(None)

    def service(self, call: Any) -> Any:
        """Return the handler of a call, as grpc asks for it."""
        return grpc.unary_unary_rpc_method_handler(partial(self._answer, call.method))

    async def _answer(self, path: str, request: bytes, context: Any) -> bytes:
        try:
            return await self._link.call(path, request)
        except ConnectionError:
            status = Status(Code.UNAVAILABLE, NO_CONTROLLER)
        except Exception as error:
            if not isinstance(error, InferenceError):
                logger.exception("%s cannot be answered for the cluster", path)
            status = status_of(error)
        await context.abort(STATUSES[status.code], status.details, status.trailers)
        raise AssertionError("abort has raised an error")


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("the reports to the controller have ended", exc_info=task.exception())
