"""`halfserve serve`."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from serve.engine.backend import Placement
from serve.engine.config import Defaults
from serve.engine.errors import ModelLoadError
from serve.server import Ready, ServerOptions
from serve.transports.choice import TransportName
from serve.transports.transport import BindError

EXIT_CODES: dict[type[Exception], int] = {ModelLoadError: 1, BindError: 1}


def serve(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A model repository folder, or one .onnx file.")],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    grpc_port: Annotated[int, typer.Option(min=0, max=65535, help="gRPC port; 0 finds a free one.")] = 8001,
    max_batch_size: Annotated[int, typer.Option(min=1, help="Rows in one batch, where the model's config does not say.")] = 32,
    max_queue_delay_us: Annotated[
        int, typer.Option(min=0, help="Microseconds a request may wait for others, where the model's config does not say.")
    ] = 0,
    max_queue_size: Annotated[int, typer.Option(min=1, help="Requests that may wait for one model.")] = 8192,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads of one operator; 0 lets the runtime choose.")] = 0,
    transport: Annotated[
        TransportName, typer.Option(help="What carries gRPC: libnghttp2 (fast) or grpcio's server (the reference).")
    ] = TransportName.NGHTTP2,
    *,
    cpu: Annotated[bool, typer.Option("--cpu", help="Stay on the CPU even where there is a GPU.")] = False,
    require_gpu: Annotated[bool, typer.Option("--require-gpu", help="Refuse to start without a GPU.")] = False,
    shared_memory: Annotated[
        bool, typer.Option("--shared-memory", help="Let clients on this machine leave tensors in shared memory.")
    ] = False,
    drain_seconds: Annotated[float, typer.Option(min=0.1, help="Time for requests in flight after SIGTERM.")] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the ready line as JSON.")] = False,
) -> None:
    """Serve models over gRPC in batches until SIGTERM or Ctrl-C.

    Speaks KServe v2 (the Open Inference Protocol), so Triton's clients and perf_analyzer work unchanged.

    Example: halfserve serve runs/demo/repository --grpc-port 8001
    """
    if cpu and require_gpu:
        raise typer.BadParameter("--cpu and --require-gpu exclude each other; use one of them")
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    # grpcio's core writes to stderr on its own, with file names of its sources.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    options = ServerOptions(
        path=path,
        host=host,
        grpc_port=grpc_port,
        placement=Placement(use_gpu=not cpu, require_gpu=require_gpu, threads=threads),
        defaults=Defaults(max_batch_size=max_batch_size, max_queue_delay_us=max_queue_delay_us, max_queue_size=max_queue_size),
        drain_s=drain_seconds,
        transport=transport,
        shared_memory=shared_memory,
    )
    _run(options, _print_json if as_json else _print_text)


def _run(options: ServerOptions, on_ready: Callable[[Ready], None]) -> None:
    # Here, so that `halfserve serve --help` does not wait for them.
    from serve import server  # noqa: PLC0415  (see above)
    from serve.backends.onnxruntime_backend import OnnxRuntime  # noqa: PLC0415  (see above)

    with asyncio.Runner(loop_factory=_fastest_loop()) as runner:
        runner.run(server.serve(options, OnnxRuntime(), on_ready))


def _fastest_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop  # noqa: PLC0415  (has no wheel for Windows)
    except ModuleNotFoundError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _print_text(ready: Ready) -> None:
    for model in ready.models:
        batch = f"batches of up to {model.max_batch_size}" if model.max_batch_size else "no batching"
        typer.echo(f"{model.name}/{model.version}  {model.provider}, {model.precision}, {batch}")
    typer.echo(f"gRPC on {ready.host}:{ready.grpc_port}, ready in {ready.seconds:.2f} s; Ctrl-C stops")


def _print_json(ready: Ready) -> None:
    models = [
        {
            "name": model.name,
            "version": model.version,
            "provider": model.provider,
            "precision": model.precision,
            "max_batch_size": model.max_batch_size,
        }
        for model in ready.models
    ]
    line = {"host": ready.host, "grpc_port": ready.grpc_port, "seconds": round(ready.seconds, 3), "models": models}
    typer.echo(json.dumps(line))
