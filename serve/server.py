"""The server's life: load, listen, be ready, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from serve.engine.backend import Placement, Runtime
from serve.engine.config import Defaults
from serve.engine.ignored_settings import ignored_settings
from serve.engine.inference_core import InferenceCore
from serve.engine.model import Model
from serve.engine.model_repository import find_models, load_model
from serve.protocol.service import Service
from serve.transports.choice import TransportName, make_transport
from serve.transports.transport import Transport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How to serve.

    Attributes:
        path: a model repository, or an .onnx file.
        host: the address to listen on.
        grpc_port: 0 finds a free one.
        placement: where models run.
        defaults: for what a model's configuration does not say.
        drain_s: seconds that requests in flight get to finish after SIGTERM or SIGINT.
        transport: what carries gRPC.
        shared_memory: whether clients on this machine may leave tensors in shared memory.
    """

    path: Path
    host: str = "127.0.0.1"
    grpc_port: int = 8001
    placement: Placement = field(default_factory=Placement)
    defaults: Defaults = field(default_factory=Defaults)
    drain_s: float = 30.0
    transport: TransportName = TransportName.NGHTTP2
    shared_memory: bool = False


@dataclass(frozen=True, kw_only=True)
class Ready:
    """What a started server says of itself.

    Attributes:
        models: loaded.
        host: as asked for.
        grpc_port: the port it listens on.
        seconds: from the start of loading until requests are taken.
    """

    models: Sequence[Model]
    host: str
    grpc_port: int
    seconds: float


def load_models(options: ServerOptions, runtime: Runtime) -> list[Model]:
    """Load everything that the path holds.

    Raises:
        ModelLoadError: the first model that cannot be served, and why.
    """
    models = []
    for files in find_models(options.path):
        ignored = ignored_settings(files.config.message)
        if ignored:
            logger.warning("%s: no effect here: %s", files.config.source, ", ".join(ignored))
        models.append(load_model(files, runtime, options.placement, options.defaults))
    return models


async def serve(options: ServerOptions, runtime: Runtime, on_ready: Callable[[Ready], None]) -> None:
    """Serve until SIGTERM or SIGINT, then drain and return.

    New calls are refused from the signal on, health says NOT_SERVING, and what was taken is answered.

    Raises:
        ModelLoadError: a model cannot be served.
        BindError: the address cannot be listened on.
    """
    started = time.monotonic()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    models = load_models(options, runtime)
    # What is there by now stays as long as the server: the collector need not walk through it while requests wait (some 20 ms).
    gc.freeze()
    core = InferenceCore(models)
    service = Service(core, server_version=version("halfserve"), shared_memory=options.shared_memory)
    transport = make_transport(options.transport, service, options.host, options.grpc_port)
    port = await transport.start()
    for name in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(NotImplementedError):  # Windows: Ctrl-C raises KeyboardInterrupt instead
            loop.add_signal_handler(name, stop.set)
    on_ready(Ready(models=models, host=options.host, grpc_port=port, seconds=time.monotonic() - started))
    try:
        await stop.wait()
    finally:
        await _drain(core, transport, options.drain_s)


async def _drain(core: InferenceCore, transport: Transport, drain_s: float) -> None:
    try:
        await asyncio.wait_for(core.drain(), drain_s)
    except TimeoutError:
        logger.warning("requests were still running after %g s; they end unanswered", drain_s)
    # Answers are on their way out and health watchers must not hold the server up: a moment is enough for both.
    await transport.stop(FLUSH_S)


FLUSH_S = 0.5
