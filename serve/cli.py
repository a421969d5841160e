"""`halfserve serve`."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from serve import cli_options as opt
from serve.addresses import addresses
from serve.departure import leave_at_once, leave_threads_behind
from serve.engine.backend import DevicePlacement
from serve.engine.config.batching import BatchingOptions
from serve.engine.config.model_config import Defaults
from serve.engine.errors import FailedPreconditionError, ModelLoadError
from serve.http.options import HttpOptions
from serve.log_lines import log_to_standard_error
from serve.lost_device import LostDeviceError
from serve.model_control.options import ControlMode, ControlOptions
from serve.observability.options import AccessLog, ObserveOptions
from serve.protocol.open_files import FEWEST_FILES, allow_more, most_files
from serve.ready_lines import print_json, print_text, tell_again, told
from serve.security.errors import SecurityError
from serve.security.options import ClientLimits, SecurityOptions, TlsOptions
from serve.server import Ready, ServerOptions
from serve.signals import ignore_hang_up
from serve.supervisor.endings import LOST_DEVICE_CODE
from serve.supervisor.inheritance import Inheritance, take_over
from serve.transports.listening import BindError
from serve.transports.transport import TransportName

EXIT_CODES: dict[type[Exception], int] = {ModelLoadError: 1, BindError: 1, FailedPreconditionError: 1, SecurityError: 1}


def serve(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A model repository folder, or one .onnx or .pt2 file.")],
    *,
    host: opt.Host = "127.0.0.1",
    grpc_port: opt.GrpcPort = 8001,
    http: opt.Http = True,
    http_port: opt.HttpPort = None,
    metrics_port: opt.MetricsPort = None,
    http_allowed_host: opt.HttpAllowedHost = None,
    transport: opt.Transport = TransportName.NGHTTP2,
    shared_memory: opt.SharedMemory = False,
    model_control: opt.ModelControl = ControlMode.NONE,
    load_model: opt.LoadModel = None,
    poll_seconds: opt.PollSeconds = 5.0,
    warm_up_seconds: opt.WarmUpSeconds = 5.0,
    load_seconds: opt.LoadSeconds = 1800.0,
    keep_going: opt.KeepGoing = False,
    model_uploads: opt.ModelUploads = False,
    trust_torch_archives: opt.TrustTorchArchives = False,
    max_batch_size: opt.MaxBatchSize = 32,
    max_queue_delay_us: opt.MaxQueueDelayUs = 0,
    max_queue_size: opt.MaxQueueSize = 8192,
    max_queue_mib: opt.MaxQueueMib = 1024,
    compute_slots: opt.ComputeSlots = 0,
    threads: opt.Threads = 0,
    cpu: opt.Cpu = False,
    require_gpu: opt.RequireGpu = False,
    max_buffered_mib: opt.MaxBufferedMib = None,
    access_log: opt.AccessLogChoice = AccessLog.OFF,
    access_log_file: opt.AccessLogFile = None,
    access_log_every: opt.AccessLogEvery = 100,
    trace_to: opt.TraceTo = "",
    trace_rate: opt.TraceRate = 1000,
    tls_cert: opt.TlsCert = None,
    tls_key: opt.TlsKey = None,
    tls_client_ca: opt.TlsClientCa = None,
    token_file: opt.TokenFile = None,
    admin_port: opt.AdminPort = None,
    admin_socket: opt.AdminSocket = None,
    client_rate: opt.ClientRate = None,
    client_burst: opt.ClientBurst = None,
    client_concurrency: opt.ClientConcurrency = None,
    lame_duck_seconds: opt.LameDuckSeconds = 0.0,
    drain_seconds: opt.DrainSeconds = 30.0,
    supervise: opt.Supervise = False,
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
    if not http:
        _check_without_http(http_port, metrics_port, http_allowed_host)
    _check_open_files()
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
    usual_http, usual_metrics = (0, 0) if grpc_port == 0 else (opt.HTTP_PORT, opt.METRICS_PORT)
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
        placement=DevicePlacement(use_gpu=not cpu, require_gpu=require_gpu, threads=threads),
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
            load_limit_s=load_seconds,
            lame_duck_s=lame_duck_seconds,
        ),
        observe=ObserveOptions(
            access_log=access_log,
            access_log_file=access_log_file,
            access_log_every=access_log_every,
            trace_to=trace_to,
            trace_rate=trace_rate,
        ),
        max_buffered_bytes=None if max_buffered_mib is None else max_buffered_mib * 2**20,
        drain_s=drain_seconds,
        transport=transport,
        shared_memory=shared_memory,
        http=rest if http else None,
        security=security,
    )
    ignore_hang_up()
    if supervise and inherited is None:
        from serve.supervisor.launch import become_supervisor  # noqa: PLC0415  (needs what Windows does not have)

        become_supervisor(addresses(options))
    scheme = "http" if security.tls is None else "https"
    tell = print_json if as_json else partial(print_text, scheme=scheme)
    if inherited and inherited.restarts:
        tell = partial(tell_again, restarts=inherited.restarts)
    _run(options, partial(told, tell), inherited, trust_torch_archives=trust_torch_archives)


def _check_without_http(http_port: int | None, metrics_port: int | None, allowed_hosts: list[str] | None) -> None:
    for option, is_given in (
        ("--http-port", http_port is not None),
        ("--metrics-port", metrics_port is not None and metrics_port >= 0),
        ("--http-allowed-host", bool(allowed_hosts)),
    ):
        if is_given:
            raise typer.BadParameter(
                f"{option} means nothing with --no-http, which has no metrics either; leave one of them out"
            )


def _check_open_files() -> None:
    allow_more()
    if most_files() < FEWEST_FILES:
        raise FailedPreconditionError(
            f"the limit of open files is {most_files()}, expected {FEWEST_FILES} or more: each connection is one; "
            "raise it (ulimit -n 4096)"
        )


def _check_supervised(transport: TransportName) -> None:
    if sys.platform == "win32":
        raise typer.BadParameter("--supervise needs processes that inherit sockets, which Windows does not have; leave it out")
    if transport is TransportName.GRPCIO:
        raise typer.BadParameter(
            "--supervise needs --transport nghttp2: grpcio cannot take over sockets; leave one of them out"
        )


def _run(
    options: ServerOptions,
    on_ready: Callable[[Ready], None],
    inherited: Inheritance | None,
    *,
    trust_torch_archives: bool,
) -> None:
    # Here, so that `halfserve serve --help` does not wait for them.
    from serve import server  # noqa: PLC0415  (see above)
    from serve.backends.runtimes import probing_runtimes  # noqa: PLC0415  (see above)

    log_to_standard_error()
    runtimes = probing_runtimes(trust_torch_archives=trust_torch_archives)
    with asyncio.Runner(loop_factory=_fastest_loop()) as runner:
        try:
            runner.run(server.serve(options, runtimes, on_ready, inherited))
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
