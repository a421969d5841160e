"""The server's life: load, listen, be ready, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serve.collector import seldom_collecting
from serve.engine.backend import DevicePlacement, Runtime
from serve.engine.config.batching import BatchingOptions
from serve.engine.config.model_config import Defaults
from serve.engine.inference_core import InferenceCore
from serve.engine.model import Model
from serve.engine.resource_limits import memory_limit_bytes
from serve.http.options import HttpOptions
from serve.http.start import start_http
from serve.lost_device import LostDevice
from serve.model_control.loading import VersionLoader
from serve.model_control.model_control import ModelControl
from serve.model_control.options import ControlOptions
from serve.observability.options import ObserveOptions
from serve.protocol.open_files import most_connections, most_files
from serve.protocol.service import Service
from serve.security.memory_budget import DEFAULT_BYTES, MemoryBudget
from serve.security.options import SecurityOptions
from serve.security.security import Security
from serve.signals import stop_on_signal
from serve.supervisor.handover import ADMIN, GRPC
from serve.supervisor.inheritance import Inheritance
from serve.transports.listener import ConnectionLimit
from serve.transports.transport import Transport, TransportName, make_transport

if TYPE_CHECKING:
    from serve.http.rest_server import RestServer

logger = logging.getLogger(__name__)

FLUSH_S = 0.5
ADMIN_CONNECTIONS = 8  # besides those of the other ports
BUFFERED_PART = 16  # of the memory that this process may use, for what clients make it hold
HEAP_PART = 8  # of that, for what the heap keeps beside what is counted


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How to serve.

    Attributes:
        path: a model repository, or an .onnx file.
        host: the address to listen on.
        grpc_port: 0 finds a free one.
        placement: where models run.
        defaults: for what a model's configuration does not say.
        control: which models are served, and how they come and go.
        max_buffered_bytes: of requests that are not answered and answers that are not read, over all clients; None stands for
            256 MiB, or a sixteenth of the memory that this process may use, whichever is less.
        drain_s: seconds that requests in flight get to finish after SIGTERM or SIGINT.
        transport: what carries gRPC.
        shared_memory: whether clients on this machine may leave tensors in shared memory.
        observe: what to log and trace.
        batching: what holds for all models together.
        http: the REST interface, the page and the metrics; None serves none.
        security: who may talk to the server, and how.
    """

    path: Path
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


@dataclass(frozen=True, kw_only=True)
class Ready:
    """What a started server says of itself.

    Attributes:
        models: loaded.
        host: as asked for.
        grpc_port: the port it listens on.
        seconds: from the start of loading until requests are taken.
        http_port: of the REST interface and the page; None where there is none.
        metrics_port: of the metrics; None where they have no port of their own.
        admin_port: of what changes the server; None where it has no port of its own.
    """

    models: Sequence[Model]
    host: str
    grpc_port: int
    seconds: float
    http_port: int | None = None
    metrics_port: int | None = None
    admin_port: int | None = None


async def serve(
    options: ServerOptions, runtime: Runtime, on_ready: Callable[[Ready], None], inherited: Inheritance | None = None
) -> None:
    """Serve until SIGTERM or SIGINT, then drain and return.

    From the signal on health says NOT_SERVING; after the lame-duck delay new calls are refused, and what was taken is answered.
    A second signal ends the process at once.

    Args:
        options: how.
        runtime: reads and runs models.
        on_ready: is called once requests are taken.
        inherited: what a supervisor has given this process, whose end is a signal too; None where there is none.

    Raises:
        LostDeviceError: under a supervisor only: a device does not compute for this process any more.
        ModelLoadError: a model cannot be served.
        BindError: the address cannot be listened on.
        SecurityError: a certificate, a key or the file of tokens cannot be used.
    """
    started = time.monotonic()
    stop = stop_on_signal()
    core = InferenceCore([])
    lost = LostDevice(stop, is_supervised=inherited is not None)
    core.on_lost_device = lost.tell
    if inherited is not None:
        inherited.attend(stop.set)
        core.figures.readings["worker_restarts"] = lambda: inherited.restarts
    sockets = {} if inherited is None else inherited.sockets
    core.slots = options.batching.slots()
    security = Security(options.security, core.figures.refuse, shared_memory=options.shared_memory)
    security.reload_on_hang_up()
    security.warn_if_exposed(options.host)
    control = ModelControl(core, options.path, _loader(options, runtime), options.control)
    budget = _budget(options)
    try:
        if not await _unless(stop, control.start()):
            return
        service = Service(
            core, server_version=version("halfserve"), shared_memory=options.shared_memory, observe=options.observe
        )
        listening: list[Transport | RestServer] = []
        connections = _connection_limit(options)
        try:
            admin_port = await _listen_for_admin(options, service, security, budget, listening, sockets.get(ADMIN, ()))
            transport = make_transport(
                options.transport,
                service,
                options.host,
                options.grpc_port,
                security.main,
                sockets.get(GRPC, ()),
                connections=connections,
                budget=budget,
            )
            port = await transport.start()
            listening.append(transport)
            rest = await start_http(
                core, service, options.host, options.http, security.main, sockets, connections=connections, budget=budget
            )
            if rest is not None:
                listening.append(rest)
            security.start()
            # grpcio leaves every refused call, its message included, to the collector.
            with seldom_collecting() if options.transport is TransportName.NGHTTP2 else contextlib.nullcontext():
                if inherited is not None:
                    inherited.tell_ready()  # first: who ends this process once it is said to be ready has to see another one
                on_ready(_ready(core, options, started, port, rest, admin_port))
                await stop.wait()
                await _lame_duck(core, lost.shorten(options.control.lame_duck_s))
        finally:
            security.close()
            await _drain(core, listening, lost.shorten(options.drain_s))
            service.observability.close()
    finally:
        control.close()
    lost.check()


def _connection_limit(options: ServerOptions) -> ConnectionLimit:
    """Of all ports but the admin's: whoever runs the server is let in while strangers hold all other connections."""
    most = most_connections(regions=options.shared_memory)
    return ConnectionLimit(most, f"there is room for {most}, as this process may open {most_files()} files (ulimit -n)")


async def _listen_for_admin(
    options: ServerOptions,
    service: Service,
    security: Security,
    budget: MemoryBudget,
    listening: list[Transport | RestServer],
    sockets: Sequence[socket.socket],
) -> int | None:
    """Before the main port, whose figures are to be read where both tell some."""
    if security.admin is None:
        return None
    transport = make_transport(
        options.transport,
        service,
        options.host,
        security.admin_port or 0,
        security.admin,
        sockets,
        connections=ConnectionLimit(ADMIN_CONNECTIONS, f"the admin port takes {ADMIN_CONNECTIONS}"),
        budget=budget,
    )
    port = await transport.start()
    listening.append(transport)
    return None if security.admin.socket is not None else port


def _ready(
    core: InferenceCore,
    options: ServerOptions,
    started: float,
    grpc_port: int,
    rest: RestServer | None,
    admin_port: int | None,
) -> Ready:
    return Ready(
        models=core.models(),
        host=options.host,
        grpc_port=grpc_port,
        seconds=time.monotonic() - started,
        http_port=None if rest is None else rest.port,
        metrics_port=None if rest is None else rest.metrics_port,
        admin_port=admin_port,
    )


def _budget(options: ServerOptions) -> MemoryBudget:
    size = options.max_buffered_bytes
    if size is None:
        memory = memory_limit_bytes()
        size = DEFAULT_BYTES if memory is None else min(DEFAULT_BYTES, memory // BUFFERED_PART)
    return MemoryBudget(size - size // HEAP_PART)


def _loader(options: ServerOptions, runtime: Runtime) -> VersionLoader:
    return VersionLoader(
        runtime=runtime,
        placement=options.placement,
        defaults=options.defaults,
        warm_up_budget_s=options.control.warm_up_budget_s,
    )


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Whether the work was done before the signal came; what it raises, this raises."""
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
    """Say that no requests should come here, and go on taking those that do."""
    core.retire()
    if seconds:
        logger.info("not ready from now on; new calls are refused in %g s", seconds)
        await asyncio.sleep(seconds)


async def _drain(core: InferenceCore, listening: Sequence[Transport | RestServer], drain_s: float) -> None:
    # First, while all that comes is still served: what clients have sent before they read it must not be lost.
    await asyncio.gather(*(server.give_notice() for server in listening))
    # Then it is final (GOAWAY). It ends when the last call has ended, or with the bound.
    leaving = [asyncio.create_task(server.stop(drain_s)) for server in listening]
    try:
        await asyncio.wait_for(core.drain(), drain_s)
    except TimeoutError:
        logger.warning("requests were still running after %g s; they end unanswered", drain_s)
    # Health watchers must not hold the server up: a moment is enough for them. Answers on their way out have what is left.
    await asyncio.gather(*(server.stop(FLUSH_S) for server in listening))
    await asyncio.gather(*leaving)
