"""The server's life: load, listen, be ready, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfserve.protos.certificate_signature import CertificateKeyError, VerifyingKey
from halfserve.serve.engine.backend import DevicePlacement, Runtime
from halfserve.serve.engine.caching.response_cache import DEFAULT_MIB, ResponseCache
from halfserve.serve.engine.config.batching import BatchingOptions
from halfserve.serve.engine.config.model_config import Defaults
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.model_calls import CoreUser, ModelCalls
from halfserve.serve.engine.model_statistics import LatencyFigures
from halfserve.serve.engine.resource_limits import memory_limit_bytes
from halfserve.serve.http.options import HttpOptions
from halfserve.serve.members.membership import Membership, membership
from halfserve.serve.model_control.loading import VersionLoader
from halfserve.serve.model_control.model_control import ModelControl
from halfserve.serve.model_control.options import ControlOptions
from halfserve.serve.observability.settings import ObserveOptions
from halfserve.serve.process import infrequent_collection, stop_on_signal
from halfserve.serve.protocol.forwarded_headers import ForwardedHeaders
from halfserve.serve.protocol.open_files import most_connections, most_files
from halfserve.serve.protocol.service import Service
from halfserve.serve.security.memory_budget import DEFAULT_BYTES, MemoryBudget
from halfserve.serve.security.options import SecurityError, SecurityOptions
from halfserve.serve.security.security import PortSecurity, Security
from halfserve.serve.startup_report import StartupReport
from halfserve.serve.storage.options import ObjectStorage
from halfserve.serve.storage.repository_copy import RepositoryCopy
from halfserve.serve.supervisor.handover import ADMIN, GRPC, HTTP, METRICS
from halfserve.serve.supervisor.launch import SupervisorLink
from halfserve.serve.transports.listener import ConnectionLimit
from halfserve.serve.transports.listening import Address
from halfserve.serve.transports.transport import Transport, TransportName, make_transport

if TYPE_CHECKING:
    from halfserve.serve.http.rest_server import RestServer

logger = logging.getLogger(__name__)

FLUSH_S = 0.5
CLOSE_S = 5.0  # for Python models to finalize, where requests have not ended in time
ADMIN_CONNECTIONS = 8  # of the admin port, besides the limit of the other ports
BUFFERED_PART = 16  # clients' messages get this part of the process's memory
HEAP_PART = 8  # of that, for what the heap keeps beside what is counted
BETWEEN_STEPS_PART = 2  # of the memory budget: what tensors between the steps of ensembles are expected to take of it, at most
LOST_DEVICE_DRAIN_S = 1.0  # for models on other devices to answer what they have accepted


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How to serve.

    Attributes:
        path: a model repository, or one .onnx or .pt2 file; or where in object storage it lies.
        host: the address to listen on.
        grpc_port: 0 finds a free one.
        placement: where models run.
        defaults: used where a model's configuration says nothing.
        control: which models are served, and how they come and go.
        max_buffered_bytes: of unanswered requests and unread answers, over all clients; None stands for 256 MiB, or a
            sixteenth of the memory that this process may use if that is less.
        drain_s: seconds that requests in flight get to finish after SIGTERM or SIGINT.
        transport: what carries gRPC.
        shared_memory: whether clients on this machine may leave tensors in shared memory.
        observe: what to log and trace.
        batching: limits over all models together.
        http: the REST interface, the page and the metrics; None serves none of them.
        security: who may talk to the server, and how.
        response_cache_mib: MiB of answers for the models whose configuration has a `response_cache`; 0 keeps none.
        latencies: what the metrics tell of latencies.
        forwarded: which headers become parameters of inference requests.
        processes: how many servers with these options share the machine, the buffers and the answers kept.
    """

    path: Path | ObjectStorage
    host: str = "127.0.0.1"
    grpc_port: int = 8001
    placement: DevicePlacement = field(default_factory=DevicePlacement)
    defaults: Defaults = field(default_factory=Defaults)
    control: ControlOptions = field(default_factory=ControlOptions)
    max_buffered_bytes: int | None = None
    drain_s: float = 30.0
    transport: TransportName = TransportName.NGHTTP2
    shared_memory: bool = False
    observe: ObserveOptions = field(default_factory=ObserveOptions)
    batching: BatchingOptions = field(default_factory=BatchingOptions)
    http: HttpOptions | None = None
    security: SecurityOptions = field(default_factory=SecurityOptions)
    response_cache_mib: float = DEFAULT_MIB
    latencies: LatencyFigures = field(default_factory=LatencyFigures)
    forwarded: ForwardedHeaders = field(default_factory=ForwardedHeaders)
    processes: int = 1


class LostDeviceError(Exception):
    """A device no longer computes for this process."""


class LostDevice:
    """Ends a supervised server after a fatal device error; without a supervisor it logs the error.

    After certain errors CUDA answers every call of a process with an error; only another process can use the device again.
    """

    def __init__(self, stop: asyncio.Event, *, is_supervised: bool) -> None:
        self._stop = stop
        self._is_supervised = is_supervised
        self._fault: str | None = None

    def report(self, fault: str) -> None:
        """Act on the loss of a model instance's device after reloading failed for the same reason."""
        if self._fault is not None:
            return
        self._fault = fault
        if not self._is_supervised:
            logger.error("a device computes for this process no more; with --supervise another process would take over now")
        elif not self._stop.is_set():
            logger.error("a device computes for this process no more; another process takes over")
            self._stop.set()

    def shorten(self, seconds: float) -> float:
        """A shutdown delay, cut to LOST_DEVICE_DRAIN_S after a loss: computation on that device may never return."""
        return seconds if self._fault is None or not self._is_supervised else min(seconds, LOST_DEVICE_DRAIN_S)

    def check(self) -> None:
        """Raise after a loss that ended the server.

        Raises:
            LostDeviceError: a device was lost, and a supervisor starts the next process.
        """
        if self._fault is not None and self._is_supervised:
            raise LostDeviceError(self._fault)


async def serve(
    options: ServerOptions, runtime: Runtime, on_ready: Callable[[StartupReport], None], link: SupervisorLink | None = None
) -> None:
    """Serve until SIGTERM or SIGINT, then drain and return.

    From the signal on health is NOT_SERVING; after the lame-duck delay new calls are refused, and accepted ones are answered.
    A second signal ends the process at once.

    Args:
        options: how to serve.
        runtime: reads and runs models.
        on_ready: called once requests are accepted.
        link: to the supervisor that started this process, whose end is a stop signal too; None without one.

    Raises:
        LostDeviceError: under a supervisor only: a device no longer computes for this process.
        ModelLoadError: a model cannot be served.
        BindError: the address cannot be listened on.
        SecurityError: a certificate, a key or the token file cannot be used.
    """
    started_s = time.monotonic()
    stop = stop_on_signal()
    core = InferenceCore([])
    lost = LostDevice(stop, is_supervised=link is not None)
    core.on_lost_device = lost.report
    if isinstance(runtime, CoreUser):
        runtime.connect(ModelCalls(core))
    if link is not None:
        link.on_supervisor_end(stop.set)
        core.figures.readings["worker_restarts"] = lambda: link.restarts
    core.slots = options.batching.slots()
    core.figures.latencies = options.latencies
    _keep_responses(core, int(options.response_cache_mib * 2**20) // options.processes)
    security = Security(options.security, core.figures.refuse, shared_memory=options.shared_memory)
    member = membership(link, core, security.main.tls)
    security.reload_on_hang_up()
    security.warn_if_exposed(options.host)
    loader = VersionLoader(
        runtime=runtime,
        placement=options.placement,
        defaults=options.defaults,
        warm_up_budget_s=options.control.warm_up_budget_s,
        certificate_key=_certificate_key(options.control.certificate_key),
    )
    control = _control(core, options, loader)
    try:
        if not await _finished_before(stop, control.start()):
            return
        service = Service(
            core,
            server_version=version("halfserve"),
            shared_memory=options.shared_memory,
            observe=options.observe,
            forwarded=options.forwarded,
        )
        listening: list[Transport | RestServer] = []
        try:
            sockets = {} if link is None else link.sockets
            await member.join(service)
            report = await _listen(options, core, service, security, sockets, listening, member, started_s)
            security.start()
            # grpcio leaves reference cycles with every refused call, its message included, to the collector.
            with infrequent_collection() if options.transport is TransportName.NGHTTP2 else contextlib.nullcontext():
                if link is not None:
                    link.report_ready()  # before on_ready: a reader of the report may end this process and expect a new one
                if await _finished_before(stop, member.all_here()):
                    on_ready(replace(report, seconds=time.monotonic() - started_s))
                await stop.wait()
                await _lame_duck(core, lost.shorten(options.control.lame_duck_s))
        finally:
            security.close()
            member.retire()
            await _drain(core, listening, lost.shorten(options.drain_s))
            await member.leave()
            service.observability.close()
    finally:
        control.close()
    lost.check()


def _certificate_key(path: Path | None) -> VerifyingKey | None:
    try:
        return None if path is None else VerifyingKey(path)
    except CertificateKeyError as error:
        raise SecurityError(str(error)) from None


def addresses(options: ServerOptions) -> dict[str, Address]:
    """The addresses that a server with these options listens on."""
    host, http, security = options.host, options.http, options.security
    found = {GRPC: Address(host, options.grpc_port, "--grpc-port")}
    if http is not None:
        found[HTTP] = Address(host, http.port, "--http-port")
        if http.metrics_port is not None:
            found[METRICS] = Address(host, http.metrics_port, "--metrics-port")
    if security.admin_socket is not None:
        found[ADMIN] = Address(host, 0, "--admin-socket", security.admin_socket)
    elif security.admin_port is not None:
        found[ADMIN] = Address(host, security.admin_port, "--admin-port")
    return found


def _control(core: InferenceCore, options: ServerOptions, loader: VersionLoader) -> ModelControl:
    if isinstance(options.path, Path):
        return ModelControl(core, options.path, loader, options.control)
    copy = RepositoryCopy(options.path)
    return ModelControl(core, copy.path, loader, options.control, copy)


def _keep_responses(core: InferenceCore, size: int) -> None:
    if size:
        cache = core.response_cache = ResponseCache(size)
        core.figures.readings["response_cache_bytes"] = lambda: cache.size
        core.figures.readings["response_cache_evictions"] = lambda: cache.evictions


async def start_http(
    core: InferenceCore,
    service: Service,
    host: str,
    options: HttpOptions | None,
    guard: PortSecurity | None = None,
    listening: Mapping[str, Sequence[socket.socket]] | None = None,
    *,
    connections: ConnectionLimit | None = None,
    budget: MemoryBudget | None = None,
) -> RestServer | None:
    """Start the HTTP server, on its own sockets or on the given ones; without options there is none.

    Raises:
        BindError: an address cannot be listened on; then none is.
    """
    if options is None:
        return None
    from halfserve.serve.http.rest_server import RestServer  # noqa: PLC0415  (not imported with --no-http)

    server = RestServer(core, service, host, options, guard, listening, connections=connections, budget=budget)
    await server.start()
    return server


async def _listen(
    options: ServerOptions,
    core: InferenceCore,
    service: Service,
    security: Security,
    sockets: Mapping[str, Sequence[socket.socket]],
    listening: list[Transport | RestServer],
    member: Membership,
    started_s: float,
) -> StartupReport:
    """Listen on all ports; `listening` gets each server as soon as it listens."""
    budget = _memory_budget(options)
    core.step_memory.bound(budget.limit_bytes // BETWEEN_STEPS_PART, budget.share(is_known=True))
    # The admin port has a limit of its own: it stays reachable while other clients hold all other connections.
    most = most_connections(regions=options.shared_memory)
    reason = f"there is room for {most}, as this process may open {most_files()} files (ulimit -n)"
    connections = member.connections(most, reason)
    admin_port = None
    if security.admin is not None:  # started before the main port, whose figures replace its own where both report some
        few = ConnectionLimit(ADMIN_CONNECTIONS, f"the admin port takes {ADMIN_CONNECTIONS}")
        port, listens_on = security.admin_port or 0, sockets.get(ADMIN, ())
        admin = make_transport(
            options.transport, service, options.host, port, security.admin, listens_on, connections=few, budget=budget
        )
        port = await admin.start()
        listening.append(admin)
        admin_port = None if security.admin.socket is not None else port
    main = make_transport(
        options.transport,
        service,
        options.host,
        options.grpc_port,
        security.main,
        sockets.get(GRPC, ()),
        connections=connections,
        budget=budget,
    )
    grpc_port = await main.start()
    listening.append(main)
    rest = await start_http(
        core, service, options.host, options.http, security.main, sockets, connections=connections, budget=budget
    )
    if rest is not None:
        listening.append(rest)
    return StartupReport(
        models=core.models(),
        host=options.host,
        grpc_port=grpc_port,
        seconds=time.monotonic() - started_s,
        http_port=None if rest is None else rest.port,
        metrics_port=None if rest is None else rest.metrics_port,
        admin_port=admin_port,
        processes=options.processes,
    )


def _memory_budget(options: ServerOptions) -> MemoryBudget:
    size = options.max_buffered_bytes
    if size is None:
        memory = memory_limit_bytes()
        size = DEFAULT_BYTES if memory is None else min(DEFAULT_BYTES, memory // BUFFERED_PART)
    size //= options.processes
    return MemoryBudget(size - size // HEAP_PART)


async def _finished_before(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Whether the work finished before the stop signal; an exception of the work is raised here."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not working.done():
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await working
        return False
    working.result()
    return True


async def _lame_duck(core: InferenceCore, seconds: float) -> None:
    """Report not ready, and go on accepting requests for this time, so that load balancers notice before clients do."""
    core.retire()
    if seconds:
        logger.info("not ready from now on; new calls are refused in %g s", seconds)
        await asyncio.sleep(seconds)


async def _drain(core: InferenceCore, listening: Sequence[Transport | RestServer], drain_s: float) -> None:
    # Announce the end while requests are still accepted: those that cross the announcement on the wire must be answered.
    await asyncio.gather(*(server.give_notice() for server in listening))
    # Then refuse new calls (GOAWAY), and wait for the last call or for the time limit.
    leaving = [asyncio.create_task(server.stop(drain_s)) for server in listening]
    try:
        await asyncio.wait_for(core.drain(), drain_s)
    except TimeoutError:
        logger.warning("requests were still running after %g s; they end unanswered", drain_s)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(core.clean_up(), CLOSE_S)
    # Health watchers never end by themselves: they get FLUSH_S. Answers on their way to the client keep the rest of drain_s.
    await asyncio.gather(*(server.stop(FLUSH_S) for server in listening))
    await asyncio.gather(*leaving)
