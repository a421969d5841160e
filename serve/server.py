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
from halfserve.serve.engine.config.model_config import Defaults
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.model_calls import CoreUser, ModelCalls
from halfserve.serve.engine.model_statistics import LatencyFigures
from halfserve.serve.engine.queueing.compute_slots import ComputeSlots
from halfserve.serve.engine.repository.model_repository import ModelRepository
from halfserve.serve.engine.resource_limits import memory_limit_bytes, most_connections, most_files, usable_cores
from halfserve.serve.fleet.member.handover import ADMIN, GRPC, HTTP, METRICS
from halfserve.serve.fleet.member.membership import membership
from halfserve.serve.fleet.member.supervisor_link import Membership, SupervisorLink
from halfserve.serve.http.http_options import HttpOptions
from halfserve.serve.model_control.control_options import ControlOptions
from halfserve.serve.model_control.model_control import ModelControl
from halfserve.serve.model_control.version_loading import VersionLoader
from halfserve.serve.observability.observe_options import ObserveOptions
from halfserve.serve.process import collect_when_idle, infrequent_collection, short_switch_interval, stop_on_signal
from halfserve.serve.protocol.forwarded_headers import ForwardedHeaders
from halfserve.serve.protocol.rpc import SERVER_NAME
from halfserve.serve.protocol.service import Service
from halfserve.serve.protocol.shared_memory_regions import SharedMemoryMode
from halfserve.serve.security.memory_budget import DEFAULT_BYTES, MemoryBudget
from halfserve.serve.security.security import PortSecurity, Security
from halfserve.serve.security.security_options import SecurityError, SecurityOptions
from halfserve.serve.startup_report import StartupReport
from halfserve.serve.storage.repository_copy import RepositoryCopy
from halfserve.serve.storage.storage_options import ObjectStorage
from halfserve.serve.transports.listener import ConnectionLimit
from halfserve.serve.transports.listening import Address, listen
from halfserve.serve.transports.transport import Transport, TransportName, make_transport

if TYPE_CHECKING:
    from halfserve.serve.http.rest_server import RestServer

logger = logging.getLogger(__name__)

FLUSH_S = 0.5
CLOSE_S = 5.0  # for Python models to finalize if requests have not ended in time
ADMIN_CONNECTIONS = 8  # connection limit of the admin port, separate from that of the other ports
BUFFERED_PART = 16  # clients' messages may use 1/16 of the process's memory
HEAP_PART = 8  # 1/8 of that is reserved for heap overhead that is not counted
BETWEEN_STEPS_PART = 2  # intermediate tensors of ensembles are expected to use at most 1/2 of the memory budget
LOST_DEVICE_DRAIN_S = 1.0  # time for models on other devices to answer accepted requests


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of a server.

    Attributes:
        path: model repository, or one .onnx or .pt2 file; or its location in object storage.
        more_paths: further repositories or model files, where `path` is on this disk too.
        host: address to listen on.
        grpc: whether there is a gRPC port.
        grpc_port: gRPC port; 0 for a free one.
        reuse_ports: whether other servers may listen on the ports of gRPC and HTTP too.
        placement: devices and threads on which models run.
        defaults: values for settings that a model's configuration omits.
        control: selection, loading and unloading of models.
        max_buffered_bytes: memory limit for unanswered requests and unread answers, over all clients; None for 256 MiB, or a
            sixteenth of the memory that this process may use if that is less.
        drain_s: time for requests in flight after SIGTERM or SIGINT, in seconds.
        transport: gRPC implementation.
        shared_memory: whether clients on this machine may pass tensors in shared memory.
        shared_memory_mode: whether the server copies these tensors, or maps the clients' files.
        observe: logs and traces.
        compute_slots: most batches computed at once on the CPU, over all models, shared fairly (see `ComputeSlots`). 0: no
            bound; the operating system shares the CPU, and can preempt a long batch for a short one. A bound helps if models
            have different numbers of instances, or weights.
        http: REST interface, page and metrics; None for none of them.
        security: access rules, tokens and certificates.
        response_cache_mib: cache size for the models whose configuration has a `response_cache`, in MiB; 0 for no cache.
        latencies: metrics of latencies.
        forwarded: headers that become parameters of inference requests.
        processes: number of servers with these options that share the machine, the buffers and the cache size.
        name: name of the server in its metadata.
        strict_readiness: whether the server is ready only while every model is that was not unloaded.
    """

    path: Path | ObjectStorage
    more_paths: tuple[Path, ...] = ()
    host: str = "127.0.0.1"
    grpc: bool = True
    grpc_port: int = 8001
    reuse_ports: bool = False
    placement: DevicePlacement = field(default_factory=DevicePlacement)
    defaults: Defaults = field(default_factory=Defaults)
    control: ControlOptions = field(default_factory=ControlOptions)
    max_buffered_bytes: int | None = None
    drain_s: float = 30.0
    transport: TransportName = TransportName.NGHTTP2
    shared_memory: bool = False
    shared_memory_mode: SharedMemoryMode = SharedMemoryMode.SAFE
    observe: ObserveOptions = field(default_factory=ObserveOptions)
    compute_slots: int = 0
    http: HttpOptions | None = None
    security: SecurityOptions = field(default_factory=SecurityOptions)
    response_cache_mib: float = DEFAULT_MIB
    latencies: LatencyFigures = field(default_factory=LatencyFigures)
    forwarded: ForwardedHeaders = field(default_factory=ForwardedHeaders)
    processes: int = 1
    name: str = SERVER_NAME
    strict_readiness: bool = False


class LostDeviceError(Exception):
    """A device no longer computes for this process."""


class LostDevice:
    """Ends a supervised server after a fatal device error; without a supervisor, only logs the error.

    After certain errors CUDA answers every call of a process with an error; only a new process can use the device again.
    """

    def __init__(self, stop: asyncio.Event, *, is_supervised: bool) -> None:
        self._stop = stop
        self._is_supervised = is_supervised
        self._fault: str | None = None

    def report(self, fault: str) -> None:
        """Handle the loss of a model instance's device, after reloading the instance failed for the same reason."""
        if self._fault is not None:
            return
        self._fault = fault
        if not self._is_supervised:
            logger.error("a device computes for this process no more; with --supervise another process would take over now")
        elif not self._stop.is_set():
            logger.error("a device computes for this process no more; another process takes over")
            self._stop.set()

    def shorten(self, seconds: float) -> float:
        """Limit a shutdown delay to LOST_DEVICE_DRAIN_S after a loss, as computation on that device may never return."""
        return seconds if self._fault is None or not self._is_supervised else min(seconds, LOST_DEVICE_DRAIN_S)

    def check(self) -> None:
        """Raise LostDeviceError if a device was lost and the supervisor will start a new process."""
        if self._fault is not None and self._is_supervised:
            raise LostDeviceError(self._fault)


async def serve(
    options: ServerOptions, runtime: Runtime, on_ready: Callable[[StartupReport], None], link: SupervisorLink | None = None
) -> None:
    """Serve until SIGTERM or SIGINT, then drain and return.

    After the signal, health is NOT_SERVING; after the lame-duck delay, new calls are refused while accepted ones are answered.
    A second signal ends the process at once. `on_ready` is called once requests are accepted. The end of the supervisor that
    started this process (`link`) is a stop signal too.

    Raises:
        LostDeviceError: a device no longer computes for this process; raised only under a supervisor.
        ModelLoadError: a model cannot be served.
        BindError: the server cannot listen on an address.
        SecurityError: a certificate, a key or the token file cannot be used.
    """
    started_s = time.monotonic()
    stop = stop_on_signal()
    lost = LostDevice(stop, is_supervised=link is not None)
    core = _empty_core(options, lost)
    if isinstance(runtime, CoreUser):
        runtime.connect(ModelCalls(core))
    if link is not None:
        _follow(link, core, stop)
    security = Security(options.security, core.figures.refuse, shared_memory=options.shared_memory)
    member = membership(link, core)
    security.reload_on_hang_up()
    security.warn_if_exposed(options.host)
    control = _control(core, options, runtime)
    try:
        if not await _finished_before(stop, control.start()):
            return
        service = _service(core, options)
        listening: list[Transport | RestServer] = []
        collecting = asyncio.create_task(collect_when_idle())
        try:
            sockets = _shared_sockets(options) if link is None else link.sockets
            await member.join(service)
            report = await _listen(options, core, service, security, sockets, listening, member, started_s)
            security.start()
            # grpcio leaves a reference cycle, with the message, for every refused call, so the collector must run normally.
            collection = infrequent_collection() if options.transport is TransportName.NGHTTP2 else contextlib.nullcontext()
            with short_switch_interval(), collection:
                if link is not None:
                    link.report_ready()  # before on_ready, whose reader may end this process and expect a new one
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
            collecting.cancel()
    finally:
        control.close()
    lost.check()


def _follow(link: SupervisorLink, core: InferenceCore, stop: asyncio.Event) -> None:
    """End with the supervisor, and count its restarts."""
    link.on_supervisor_end(stop.set)
    core.figures.counter(
        "halfserve_worker_restarts_total", "Servers that a supervisor has started after the first", lambda: link.restarts
    )


def _empty_core(options: ServerOptions, lost: LostDevice) -> InferenceCore:
    core = InferenceCore([])
    core.on_lost_device = lost.report
    core.slots = ComputeSlots(options.compute_slots) if options.compute_slots else None
    core.figures.latencies, core.needs_all_models = options.latencies, options.strict_readiness
    _keep_responses(core, int(options.response_cache_mib * 2**20) // options.processes)
    return core


def _service(core: InferenceCore, options: ServerOptions) -> Service:
    return Service(
        core,
        server_version=version("halfserve"),
        server_name=options.name,
        shared_memory=options.shared_memory,
        shared_memory_mode=options.shared_memory_mode,
        observe=options.observe,
        forwarded=options.forwarded,
    )


def _certificate_key(path: Path | None) -> VerifyingKey | None:
    try:
        return None if path is None else VerifyingKey(path)
    except CertificateKeyError as error:
        raise SecurityError(str(error)) from None


def addresses(options: ServerOptions) -> dict[str, Address]:
    """Return the addresses that a server with these options listens on."""
    host, http, security = options.host, options.http, options.security
    shared = options.reuse_ports
    found = {GRPC: Address(host, options.grpc_port, "--grpc-port", is_shared=shared)} if options.grpc else {}
    if http is not None:
        if http.port is not None:
            found[HTTP] = Address(host, http.port, "--http-port", is_shared=shared)
        if http.metrics_port is not None:
            found[METRICS] = Address(host, http.metrics_port, "--metrics-port")
    if security.admin_socket is not None:
        found[ADMIN] = Address(host, 0, "--admin-socket", security.admin_socket)
    elif security.admin_port is not None:
        found[ADMIN] = Address(host, security.admin_port, "--admin-port")
    return found


def _shared_sockets(options: ServerOptions) -> Mapping[str, Sequence[socket.socket]]:
    """Listen on the ports that other servers may use too."""
    return {name: listen(address) for name, address in addresses(options).items() if address.is_shared}


def _control(core: InferenceCore, options: ServerOptions, runtime: Runtime) -> ModelControl:
    chosen = options.control
    loader = VersionLoader(
        runtime=runtime,
        placement=options.placement,
        defaults=options.defaults,
        warm_up_budget_s=chosen.warm_up_budget_s,
        certificate_key=_certificate_key(chosen.certificate_key),
    )
    if options.processes > 1 and not chosen.load_threads:  # they load the same models at the same time
        chosen = replace(chosen, load_threads=max(1, usable_cores() // options.processes))
    if chosen.max_loaded_bytes:
        chosen = replace(chosen, max_loaded_bytes=max(1, chosen.max_loaded_bytes // options.processes))
    if isinstance(options.path, Path):
        paths = (options.path, *options.more_paths)
        repository = ModelRepository(*paths, config_name=chosen.config_name, needs_config=chosen.needs_config)
        return ModelControl(core, repository, loader, chosen)
    copy = RepositoryCopy(options.path)
    return ModelControl(core, ModelRepository(copy.path, needs_config=chosen.needs_config), loader, chosen, copy)


def _keep_responses(core: InferenceCore, size: int) -> None:
    if size:
        cache = core.response_cache = ResponseCache(size)
        core.figures.gauge("halfserve_response_cache_bytes", "Answers that the response cache holds", lambda: cache.size)
        core.figures.counter(
            "halfserve_response_cache_evictions_total", "Answers that it dropped to make room", lambda: cache.evictions
        )


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
    """Start the HTTP server, on its own sockets or on the given ones; returns None without options.

    Raises:
        BindError: the server cannot listen on an address; no socket stays open then.
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
    core.pictures.bound(budget.limit_bytes, budget.share(is_known=True))
    core.step_memory.bound(budget.limit_bytes // BETWEEN_STEPS_PART, budget.share(is_known=True))
    # The admin port has its own limit, so that it stays reachable while clients use up all other connections.
    most = most_connections(regions=options.shared_memory)
    reason = f"there is room for {most}, as this process may open {most_files()} files (ulimit -n)"
    connections = member.connections(most, reason)
    admin_port = None
    if security.admin is not None:  # started before the main port, whose values replace its own in the metrics
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
    grpc_port = None
    if options.grpc:
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
        http_port=None if rest is None else rest.port or None,
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
    """Return whether the work finished before the stop signal; an exception of the work is raised."""
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
    """Report not ready but accept requests for this time, so that load balancers notice before clients do."""
    core.retire()
    if seconds:
        logger.info("not ready from now on; new calls are refused in %g s", seconds)
        await asyncio.sleep(seconds)


async def _finish_sequences(core: InferenceCore, drain_s: float) -> float:
    """Let clients end their sequences over open connections, which the next steps close; returns the seconds left after it."""
    started_s = time.monotonic()
    try:
        await asyncio.wait_for(core.finish_sequences(), drain_s)
    except TimeoutError:
        logger.warning("sequences were still running after %g s; they end here", drain_s)
    return max(min(FLUSH_S, drain_s), drain_s - (time.monotonic() - started_s))


async def _drain(core: InferenceCore, listening: Sequence[Transport | RestServer], drain_s: float) -> None:
    drain_s = await _finish_sequences(core, drain_s)
    # Announce the end while requests are still accepted, as requests that are on their way must be answered.
    await asyncio.gather(*(server.give_notice() for server in listening))
    # Then refuse new calls (GOAWAY), and wait for the last call or the time limit.
    leaving = [asyncio.create_task(server.stop(drain_s)) for server in listening]
    try:
        await asyncio.wait_for(core.drain(), drain_s)
    except TimeoutError:
        logger.warning("requests were still running after %g s; they end unanswered", drain_s)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(core.clean_up(), CLOSE_S)
    # Health watchers never end by themselves: they get FLUSH_S. Answers being sent keep the rest of drain_s.
    await asyncio.gather(*(server.stop(FLUSH_S) for server in listening))
    await asyncio.gather(*leaving)
