"""`halfserve serve`."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from serve.addresses import addresses
from serve.control.options import ControlMode, ControlOptions
from serve.departure import leave_at_once, leave_threads_behind
from serve.engine.backend import Placement
from serve.engine.batching import BatchingOptions
from serve.engine.config import Defaults
from serve.engine.errors import FailedPreconditionError, ModelLoadError
from serve.http.options import HttpOptions
from serve.lost_device import LostDeviceError
from serve.observability.options import AccessLog, ObserveOptions
from serve.ready_lines import print_json, print_text, tell_again, told
from serve.security.errors import SecurityError
from serve.security.options import ClientLimits, SecurityOptions, TlsOptions
from serve.server import Ready, ServerOptions
from serve.supervisor.endings import LOST_DEVICE_CODE
from serve.supervisor.inheritance import Inheritance, take_over
from serve.transports.choice import TransportName
from serve.transports.transport import BindError

EXIT_CODES: dict[type[Exception], int] = {ModelLoadError: 1, BindError: 1, FailedPreconditionError: 1, SecurityError: 1}

HTTP_PORT, METRICS_PORT = 8000, 8002


def serve(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A model repository folder, or one .onnx or .pt2 file.")],
    *,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    grpc_port: Annotated[int, typer.Option(min=0, max=65535, help="gRPC port; 0 finds a free one.")] = 8001,
    http: Annotated[bool, typer.Option("--http/--no-http", help="Serve REST, the page and metrics too.")] = True,
    http_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help=f"Port of REST and the page, {HTTP_PORT} by default; 0 finds a free one, as --grpc-port 0 does.",
            show_default=False,
        ),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=-1,
            max=65535,
            help=f"Port of the metrics alone, {METRICS_PORT} by default; 0 finds a free one, -1 has none.",
            show_default=False,
        ),
    ] = None,
    http_allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="A name by which browsers may address this server; may be repeated."),
    ] = None,
    transport: Annotated[
        TransportName,
        typer.Option(help="What carries gRPC: libnghttp2 (fast) or grpcio's server (the reference)."),
    ] = TransportName.NGHTTP2,
    shared_memory: Annotated[
        bool,
        typer.Option(
            "--shared-memory",
            help="Let clients on this machine leave tensors in shared memory (the system's, or a CUDA device's).",
        ),
    ] = False,
    model_control: Annotated[
        ControlMode,
        typer.Option(
            help="Which models are served: what PATH holds at the start (none), at any time (poll), "
            "or what RepositoryModelLoad asks for (explicit)."
        ),
    ] = ControlMode.NONE,
    load_model: Annotated[
        list[str] | None,
        typer.Option(help="Model to load at the start with --model-control explicit; may be repeated, '*' is all."),
    ] = None,
    poll_seconds: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks with --model-control poll.")] = 5.0,
    warm_up_seconds: Annotated[
        float,
        typer.Option(min=0, help="Time for trying out a model's batch sizes before it serves."),
    ] = 5.0,
    keep_going: Annotated[
        bool,
        typer.Option("--keep-going", help="Start with the models that can be served where one cannot."),
    ] = False,
    model_uploads: Annotated[
        bool,
        typer.Option("--model-uploads", help="Let load requests bring model files along (--model-control explicit)."),
    ] = False,
    max_batch_size: Annotated[int, typer.Option(min=1, help="Rows in one batch, where the model's config does not say.")] = 32,
    max_queue_delay_us: Annotated[
        int,
        typer.Option(min=0, help="Microseconds a request may wait for others, where the model's config does not say."),
    ] = 0,
    max_queue_size: Annotated[int, typer.Option(min=1, help="Requests that may wait for one model.")] = 8192,
    max_queue_mib: Annotated[int, typer.Option(min=1, help="MiB that these may hold.")] = 1024,
    compute_slots: Annotated[
        int,
        typer.Option(
            min=0, help="Batches computed at once on the CPU over all models, handed out fairly; 0 leaves it to the system."
        ),
    ] = 0,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads of one operator; 0 lets the runtime choose.")] = 0,
    cpu: Annotated[bool, typer.Option("--cpu", help="Stay on the CPU even where there is a GPU.")] = False,
    require_gpu: Annotated[bool, typer.Option("--require-gpu", help="Refuse to start without a GPU.")] = False,
    access_log: Annotated[
        AccessLog,
        typer.Option(help="Requests to log as JSON lines; sampled: every error and some answers."),
    ] = AccessLog.OFF,
    access_log_file: Annotated[Path | None, typer.Option(help="File of the access log; standard error without one.")] = None,
    access_log_every: Annotated[int, typer.Option(min=1, help="Of sampled answers, one in so many.")] = 100,
    trace_to: Annotated[
        str,
        typer.Option(help="OpenTelemetry traces: 'otlp' (OTEL_* variables say where) or a file.", show_default=False),
    ] = "",
    trace_rate: Annotated[int, typer.Option(min=1, help="One request in so many is traced, unless its caller decides.")] = 1000,
    tls_cert: Annotated[
        Path | None, typer.Option(help="PEM file of the server's certificate chain; turns TLS on, for REST too.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of its private key.")] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(help="PEM file of who may have signed clients' certificates (mTLS).")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="Lines that `halfserve token` prints; who has none of these tokens is not let in.")
    ] = None,
    admin_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port for loading, unloading and settings, refused elsewhere then.")
    ] = None,
    admin_socket: Annotated[Path | None, typer.Option(help="The same on a Unix socket that only this user can open.")] = None,
    client_rate: Annotated[
        float | None, typer.Option(min=0.001, help="Requests a second that one token or address may send.")
    ] = None,
    client_burst: Annotated[int | None, typer.Option(min=1, help="Of these at once after a pause.")] = None,
    client_concurrency: Annotated[int | None, typer.Option(min=1, help="Requests in progress of one token or address.")] = None,
    lame_duck_seconds: Annotated[
        float,
        typer.Option(min=0, help="After SIGTERM, say for so long that the server is not ready, and serve on."),
    ] = 0.0,
    drain_seconds: Annotated[float, typer.Option(min=0.1, help="Time for requests in flight after SIGTERM.")] = 30.0,
    supervise: Annotated[
        bool,
        typer.Option(
            "--supervise", help="Serve in a worker process, and start it anew when it ends; clients keep the address."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the ready line as JSON.")] = False,
) -> None:
    """Serve models over gRPC and REST in batches until SIGTERM or Ctrl-C.

    Speaks KServe v2 (the Open Inference Protocol), so Triton's clients and perf_analyzer work unchanged.

    Example: halfserve serve runs/demo/repository --grpc-port 8001
    """
    if cpu and require_gpu:
        raise typer.BadParameter("--cpu and --require-gpu exclude each other; use one of them")
    if (load_model or model_uploads) and model_control is not ControlMode.EXPLICIT:
        raise typer.BadParameter("--load-model and --model-uploads need --model-control explicit; add it or leave them out")
    if (tls_cert is None) != (tls_key is None) or (tls_client_ca and not tls_cert):
        raise typer.BadParameter("TLS takes --tls-cert and --tls-key together, and --tls-client-ca only with them")
    inherited = take_over(os.environ)
    if supervise and inherited is None:
        _check_supervised(transport)
    limits = ClientLimits(requests_per_s=client_rate, burst=client_burst, max_concurrent=client_concurrency)
    security = SecurityOptions(
        tls=TlsOptions(certificate=tls_cert, key=tls_key, client_authorities=tls_client_ca) if tls_cert and tls_key else None,
        token_file=token_file,
        admin_port=admin_port,
        admin_socket=admin_socket,
        client_limits=None if limits == ClientLimits() else limits,
    )
    # Who wants any port for gRPC starts several servers on one machine.
    usual_http, usual_metrics = (0, 0) if grpc_port == 0 else (HTTP_PORT, METRICS_PORT)
    metrics = usual_metrics if metrics_port is None else metrics_port
    rest = HttpOptions(
        port=usual_http if http_port is None else http_port,
        metrics_port=None if metrics < 0 else metrics,
        allowed_hosts=tuple(http_allowed_host or ()),
    )
    options = ServerOptions(
        path=path,
        host=host,
        grpc_port=grpc_port,
        placement=Placement(use_gpu=not cpu, require_gpu=require_gpu, threads=threads),
        defaults=Defaults(
            max_batch_size=max_batch_size,
            max_queue_delay_us=max_queue_delay_us,
            max_queue_size=max_queue_size,
            max_queue_mib=max_queue_mib,
        ),
        batching=BatchingOptions(compute_slots=compute_slots),
        control=ControlOptions(
            mode=model_control,
            load_at_start=tuple(load_model or ()),
            poll_interval_s=poll_seconds,
            keep_going=keep_going,
            uploads=model_uploads,
            warm_up_budget_s=warm_up_seconds,
            lame_duck_s=lame_duck_seconds,
        ),
        observe=ObserveOptions(
            access_log=access_log,
            access_log_file=access_log_file,
            access_log_every=access_log_every,
            trace_to=trace_to,
            trace_rate=trace_rate,
        ),
        drain_s=drain_seconds,
        transport=transport,
        shared_memory=shared_memory,
        http=rest if http else None,
        security=security,
    )
    if supervise and inherited is None:
        from serve.supervisor.launch import become_supervisor  # noqa: PLC0415  (needs what Windows does not have)

        has_files = security.tls is not None or security.token_file is not None
        become_supervisor(addresses(options), hang_up_reloads=has_files)
    scheme = "http" if security.tls is None else "https"
    tell = print_json if as_json else partial(print_text, scheme=scheme)
    if inherited and inherited.restarts:
        tell = partial(tell_again, restarts=inherited.restarts)
    _run(options, partial(told, tell), inherited)


def _check_supervised(transport: TransportName) -> None:
    if sys.platform == "win32":
        raise typer.BadParameter("--supervise needs processes that inherit sockets, which Windows does not have; leave it out")
    if transport is TransportName.GRPCIO:
        raise typer.BadParameter(
            "--supervise needs --transport nghttp2: grpcio cannot take over sockets; leave one of them out"
        )


def _run(options: ServerOptions, on_ready: Callable[[Ready], None], inherited: Inheritance | None) -> None:
    # Here, so that `halfserve serve --help` does not wait for them.
    from serve import server  # noqa: PLC0415  (see above)
    from serve.backends.runtimes import probing_runtimes  # noqa: PLC0415  (see above)

    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    with asyncio.Runner(loop_factory=_fastest_loop()) as runner:
        try:
            runner.run(server.serve(options, probing_runtimes(), on_ready, inherited))
        except LostDeviceError:
            leave_at_once(LOST_DEVICE_CODE)  # a driver that is asked to clean up after itself may never come back
    leave_threads_behind()


def _fastest_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop  # noqa: PLC0415  (has no wheel for Windows)
    except ModuleNotFoundError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
