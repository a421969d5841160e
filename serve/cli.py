"""`halfserve serve`."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from halfserve.files.object_storage import is_url
from halfserve.serve.engine.backend import CpuPrecision, DevicePlacement, Trust
from halfserve.serve.engine.config.batching import BatchingOptions
from halfserve.serve.engine.config.model_config import Defaults
from halfserve.serve.engine.cuda_driver import device_count
from halfserve.serve.engine.errors import FailedPreconditionError, ModelLoadError
from halfserve.serve.engine.model_statistics import LatencyFigures
from halfserve.serve.engine.resource_limits import usable_cores
from halfserve.serve.fleet.launch.process_count import check_room, process_count
from halfserve.serve.fleet.launch.supervision import become_supervisor
from halfserve.serve.fleet.member.handover import LOST_DEVICE_CODE
from halfserve.serve.fleet.member.supervisor_link import SupervisorLink, take_over
from halfserve.serve.http.options import MIB, HttpLimits, HttpOptions, checked_origin
from halfserve.serve.log_handler import LineFormat, log_to_standard_error
from halfserve.serve.model_control.options import ControlMode, ControlOptions
from halfserve.serve.observability.settings import AccessLog, ObserveOptions, TraceLevel
from halfserve.serve.observability.summaries import latency_figures
from halfserve.serve.process import ignore_hang_up, leave_at_once, leave_threads_behind
from halfserve.serve.protocol.forwarded_headers import ForwardedHeaders, HeaderPattern
from halfserve.serve.protocol.open_files import FEWEST_FILES, allow_more, most_files
from halfserve.serve.security.options import ClientLimits, RestrictedGroup, SecurityError, SecurityOptions, TlsOptions
from halfserve.serve.security.restricted_apis import APIS, GRPC_PREFIX, restricted_group
from halfserve.serve.server import LostDeviceError, ServerOptions, addresses
from halfserve.serve.startup_report import StartupReport, log_restart, log_start, print_json, print_text, report_startup
from halfserve.serve.storage.options import DEFAULT_GIB, ObjectStorage, default_folder
from halfserve.serve.transports.listening import BindError
from halfserve.serve.transports.transport import TransportName

logger = logging.getLogger(__name__)

EXIT_CODES: dict[type[Exception], int] = {ModelLoadError: 1, BindError: 1, FailedPreconditionError: 1, SecurityError: 1}
HTTP_PORT, METRICS_PORT = HttpOptions.port, HttpOptions.metrics_port
MAX_ROWS = 2**31 - 1  # the largest value of max_batch_size in a model's config
HOUR_US = 3_600_000_000
MAX_TEXT_MIB = 32  # the texts of one request have at most 8 Mi characters, of up to 4 bytes each
MAX_THREADS = 4096  # the runtime starts as many threads as this option says

_listening = partial(typer.Option, rich_help_panel="Listening")
_models = partial(typer.Option, rich_help_panel="Models")
_batching = partial(typer.Option, rich_help_panel="Batching")
_computing = partial(typer.Option, rich_help_panel="Computing")
_observing = partial(typer.Option, rich_help_panel="Observing")
_security = partial(typer.Option, rich_help_panel="Security")
_as_triton = partial(typer.Option, rich_help_panel="As in Triton")
_ending = partial(typer.Option, rich_help_panel="Ending")


def serve(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="A model repository folder, or one .onnx, .xml or .pt2 file; or the URL of one in object storage, such as "
            "s3://bucket/models.",
        ),
    ],
    more_paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PATH",
            help="Further ones, on this disk; a model that two of them have is not served.",
            show_default=False,
        ),
    ] = None,
    *,
    host: Annotated[str, _listening(help="Address to listen on; 0.0.0.0 for all.")] = ServerOptions.host,
    grpc_port: Annotated[int, _listening(min=0, max=65535, help="gRPC port; 0 finds a free one.")] = ServerOptions.grpc_port,
    http: Annotated[bool, _listening("--http/--no-http", help="Serve REST, the page and metrics too.")] = True,
    http_port: Annotated[
        int | None,
        _listening(
            min=0,
            max=65535,
            help=f"Port of REST and the page, {HTTP_PORT} by default; 0 finds a free one, as --grpc-port 0 does.",
            show_default=False,
        ),
    ] = None,
    metrics_port: Annotated[
        int | None,
        _listening(
            min=-1,
            max=65535,
            help=f"Port of the metrics alone, {METRICS_PORT} by default; 0 finds a free one, -1 has none.",
            show_default=False,
        ),
    ] = None,
    http_allowed_host: Annotated[
        list[str] | None, _listening(help="A name by which browsers may address this server; may be repeated.")
    ] = None,
    http_allowed_origin: Annotated[
        list[str] | None,
        _listening(
            help="An origin such as https://app.example whose pages may send inference requests, or '*'; may be repeated."
        ),
    ] = None,
    max_text_mib: Annotated[
        int,
        _listening(
            min=1,
            max=MAX_TEXT_MIB,
            help="MiB of one request to the text endpoints, such as /v1/embeddings, as sent and decompressed.",
        ),
    ] = HttpLimits.max_text_body_bytes // MIB,
    grpc_header_forward_pattern: Annotated[
        str | None,
        _as_triton(
            help="Regular expression: headers of gRPC calls with such names become parameters of their inference requests."
        ),
    ] = None,
    http_header_forward_pattern: Annotated[str | None, _as_triton(help="The same for HTTP requests.")] = None,
    metrics_config: Annotated[
        list[str] | None,
        _as_triton(
            help="NAME=VALUE: counter_latencies=false leaves counters of durations out, summary_latencies=true adds summaries "
            "with quantiles, summary_quantiles=0.5:0.05,0.99:0.001 sets these; may be repeated."
        ),
    ] = None,
    transport: Annotated[
        TransportName, _listening(help="What carries gRPC: libnghttp2 (fast) or grpcio's server (the reference).")
    ] = ServerOptions.transport,
    shared_memory: Annotated[
        bool,
        _listening(
            "--shared-memory",
            help="Let clients on this machine leave tensors in shared memory (the system's, or a CUDA device's).",
        ),
    ] = ServerOptions.shared_memory,
    model_control: Annotated[
        ControlMode,
        _models(
            help="Which models are served: what PATH holds at the start (none), at any time (poll), "
            "or what RepositoryModelLoad asks for (explicit)."
        ),
    ] = ControlOptions.mode,
    load_model: Annotated[
        list[str] | None,
        _models(help="Model to load at the start with --model-control explicit; may be repeated, '*' is all."),
    ] = None,
    poll_seconds: Annotated[
        float, _models(min=0.1, help="Seconds between two looks with --model-control poll.")
    ] = ControlOptions.poll_interval_s,
    warm_up_seconds: Annotated[
        float, _models(min=0, help="Time for trying out a model's batch sizes before it serves.")
    ] = ControlOptions.warm_up_budget_s,
    load_seconds: Annotated[
        float,
        _models(
            min=1,
            max=86400,
            help="Time for loading a model version and trying it out; if that hangs, it is refused, and others can be loaded.",
        ),
    ] = ControlOptions.load_limit_s,
    keep_going: Annotated[
        bool, _models("--keep-going", help="Start with the models that can be served where one cannot.")
    ] = ControlOptions.keep_going,
    model_uploads: Annotated[
        bool,
        _models(
            "--model-uploads", help="Let load requests bring ONNX models and label files along (--model-control explicit)."
        ),
    ] = ControlOptions.uploads,
    storage_folder: Annotated[
        Path | None,
        _models(
            help="Folder for copies of models from object storage; by default ~/.cache/halfserve/storage. Servers share it.",
            show_default=False,
        ),
    ] = None,
    storage_gib: Annotated[
        float, _models(min=0.001, help="GiB that it may take; what no server uses makes room for what one needs.")
    ] = DEFAULT_GIB,
    trust_torch_archives: Annotated[
        bool,
        _models(
            "--trust-torch-archives",
            help="Serve .pt2 files of PATH too. This trusts everybody who writes there: such a file can run any code as this "
            "user.",
        ),
    ] = False,
    trust_custom_operators: Annotated[
        bool,
        _models(
            "--trust-custom-operators",
            help="Load the libraries of PATH that models name in model_operations. This trusts everybody who writes there: a "
            "library can run any code as this user. The package onnxruntime-extensions needs no option.",
        ),
    ] = False,
    trust_python_models: Annotated[
        bool,
        _models(
            "--trust-python-models",
            help="Serve Python models (model.py) of PATH too. This trusts everybody who writes there: they run as this user.",
        ),
    ] = False,
    max_batch_size: Annotated[
        int, _batching(min=1, max=MAX_ROWS, help="Rows in one batch, where the model's config does not say.")
    ] = Defaults.max_batch_size,
    max_queue_delay_us: Annotated[
        int,
        _batching(
            min=0, max=HOUR_US, help="Microseconds a request may wait for others, where the model's config does not say."
        ),
    ] = Defaults.max_queue_delay_us,
    max_queue_size: Annotated[
        int, _batching(min=1, help="Requests that may wait for one model, where the model's config does not say.")
    ] = Defaults.max_queue_size,
    max_queue_mib: Annotated[int, _batching(min=1, help="MiB that these may hold.")] = Defaults.max_queue_mib,
    compute_slots: Annotated[
        int,
        _computing(
            min=0, help="Batches computed at once on the CPU over all models, handed out fairly; 0 leaves it to the system."
        ),
    ] = BatchingOptions.compute_slots,
    response_cache_mib: Annotated[
        float,
        _computing(
            min=0,
            help="MiB of answers to keep for the models whose config says `response_cache { enable: true }`; 0 keeps none.",
        ),
    ] = ServerOptions.response_cache_mib,
    threads: Annotated[
        int,
        _computing(
            min=0,
            max=MAX_THREADS,
            help="CPU threads of one operator; 0 lets the runtime choose, and divides the cores among --processes.",
        ),
    ] = DevicePlacement.threads,
    cpu_precision: Annotated[
        CpuPrecision,
        _computing(
            help="In which precision the CPU computes ONNX models whose config does not say; auto: the fastest for which a "
            "certificate has a passed verdict."
        ),
    ] = DevicePlacement.cpu_precision,
    processes: Annotated[
        str,
        _computing(
            help="Whole server processes that answer as one behind the same ports; 'auto' is one a core, or one with a GPU."
        ),
    ] = "1",
    cpu: Annotated[bool, _computing("--cpu", help="Stay on the CPU even where there is a GPU.")] = False,
    require_gpu: Annotated[
        bool, _computing("--require-gpu", help="Refuse to start without a GPU.")
    ] = DevicePlacement.require_gpu,
    max_buffered_mib: Annotated[
        int | None,
        _listening(
            min=4,
            help="MiB of unanswered requests and unread answers, over all clients. By default 256, or a sixteenth of the "
            "memory that the process may use if that is less.",
            show_default=False,
        ),
    ] = None,
    access_log: Annotated[
        AccessLog, _observing(help="Requests to log as JSON lines; sampled: every error and some answers.")
    ] = ObserveOptions.access_log,
    access_log_file: Annotated[
        Path | None, _observing(help="File of the access log; standard error without one.")
    ] = ObserveOptions.access_log_file,
    access_log_every: Annotated[
        int, _observing(min=1, help="Of sampled answers, one in so many.")
    ] = ObserveOptions.access_log_every,
    log_format: Annotated[
        LineFormat, _observing(help="The log's lines: text, or JSON objects; json prints the ready line as JSON too.")
    ] = LineFormat.TEXT,
    trace_to: Annotated[
        str,
        _observing(
            help="Traces: 'otlp' (OTEL_* variables say where), a file of OpenTelemetry's JSON, or triton:FILE in Triton's.",
            show_default=False,
        ),
    ] = ObserveOptions.trace_to,
    trace_level: Annotated[
        TraceLevel, _observing(help="OFF traces nothing until a client changes the trace settings.", case_sensitive=False)
    ] = ObserveOptions.trace_level,
    trace_rate: Annotated[
        int, _observing(min=1, help="One request in so many is traced, unless its caller decides.")
    ] = ObserveOptions.trace_rate,
    trace_count: Annotated[
        int, _observing(min=-1, help="Number of traces after which no more are made; -1 is no limit.")
    ] = ObserveOptions.trace_count,
    trace_log_frequency: Annotated[
        int, _observing(min=0, help="Traces in one file before the next: FILE.0, FILE.1, and so on; 0 puts all in FILE.")
    ] = ObserveOptions.trace_log_frequency,
    tls_cert: Annotated[
        Path | None, _security(help="PEM file of the server's certificate chain; turns TLS on, for REST too.")
    ] = None,
    tls_key: Annotated[Path | None, _security(help="PEM file of its private key.")] = None,
    tls_client_ca: Annotated[
        Path | None, _security(help="PEM file of who may have signed clients' certificates (mTLS).")
    ] = None,
    tls_peer_ca: Annotated[
        Path | None,
        _security(
            help="PEM file of who may have signed the certificates of a cluster's other members, if not whom the system trusts."
        ),
    ] = None,
    tls_peer_name: Annotated[
        str | None, _security(help="The name in their certificates, if it is not their addresses'.", show_default=False)
    ] = None,
    token_file: Annotated[
        Path | None, _security(help="Lines that `halfserve token --add-to` writes; who has none of these tokens is not let in.")
    ] = SecurityOptions.token_file,
    certificate_key: Annotated[
        Path | None,
        _security(
            help="PEM file of an Ed25519 public key: certificates of models have to be signed with its private key, as "
            "`halfserve export --certificate-key` does."
        ),
    ] = ControlOptions.certificate_key,
    grpc_restricted_protocol: Annotated[
        list[str] | None,
        _as_triton(
            hide_input=True,
            help="APIS:KEY=VALUE, such as inference,metadata:key=secret: calls of these need the header "
            f"{GRPC_PREFIX}KEY with this value; may be repeated. APIs: {', '.join(APIS)}.",
        ),
    ] = None,
    http_restricted_api: Annotated[
        list[str] | None, _as_triton(hide_input=True, help="The same for HTTP requests, by the header KEY; may be repeated.")
    ] = None,
    admin_port: Annotated[
        int | None, _security(min=0, max=65535, help="Port for loading, unloading and settings, refused elsewhere then.")
    ] = SecurityOptions.admin_port,
    admin_socket: Annotated[
        Path | None, _security(help="The same on a Unix socket that only this user can open.")
    ] = SecurityOptions.admin_socket,
    client_rate: Annotated[
        float | None, _security(min=0.001, help="Requests a second that one token or address may send.")
    ] = ClientLimits.requests_per_s,
    client_burst: Annotated[int | None, _security(min=1, help="Of these at once after a pause.")] = ClientLimits.burst,
    client_concurrency: Annotated[
        int | None, _security(min=1, help="Requests in progress of one token or address.")
    ] = ClientLimits.max_concurrent,
    lame_duck_seconds: Annotated[
        float, _ending(min=0, help="After SIGTERM, say for so long that the server is not ready, and serve on.")
    ] = ControlOptions.lame_duck_s,
    drain_seconds: Annotated[
        float, _ending(min=0.1, help="Time for requests in flight after SIGTERM.")
    ] = ServerOptions.drain_s,
    supervise: Annotated[
        bool,
        _ending("--supervise", help="Serve in a worker process, and restart it when it ends; clients keep the address."),
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
    if (tls_cert is None) != (tls_key is None) or ((tls_client_ca or tls_peer_ca or tls_peer_name) and not tls_cert):
        raise typer.BadParameter("TLS takes --tls-cert and --tls-key together, and its other options only with them")
    if not http:
        _check_without_http(http_port, metrics_port, http_allowed_host, http_allowed_origin)
    _check_open_files()
    link = take_over(os.environ)
    # The worker of a supervisor runs the same command, with a link to the supervisor.
    count = _process_count(processes, use_gpu=not cpu) if link is None else link.given.places
    becomes_supervisor = (supervise or count > 1) and link is None
    if becomes_supervisor:
        _check_supervised("--supervise" if count == 1 else f"--processes {processes}", transport)
    if count > 1 and not threads:
        threads = max(1, usable_cores() // count)
    limits = ClientLimits(requests_per_s=client_rate, burst=client_burst, max_concurrent=client_concurrency)
    # --grpc-port 0 is for several servers on one machine, so that the other ports are free ones as well.
    usual_http, usual_metrics = (0, 0) if grpc_port == 0 else (HTTP_PORT, METRICS_PORT)
    metrics = usual_metrics if metrics_port is None else metrics_port
    rest = HttpOptions(
        port=usual_http if http_port is None else http_port,
        metrics_port=None if metrics is None or metrics < 0 else metrics,
        allowed_hosts=tuple(http_allowed_host or ()),
        allowed_origins=tuple(_origin(text) for text in http_allowed_origin or ()),
        limits=HttpLimits(max_text_body_bytes=max_text_mib * MIB),
    )
    options = ServerOptions(
        path=_place(path, storage_folder, storage_gib),
        more_paths=_more_places(path, more_paths or []),
        host=host,
        grpc_port=grpc_port,
        placement=DevicePlacement(use_gpu=not cpu, require_gpu=require_gpu, threads=threads, cpu_precision=cpu_precision),
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
            certificate_key=certificate_key,
            lame_duck_s=lame_duck_seconds,
        ),
        observe=ObserveOptions(
            access_log=access_log,
            access_log_file=access_log_file,
            access_log_every=access_log_every,
            trace_to=trace_to,
            trace_level=trace_level,
            trace_rate=trace_rate,
            trace_count=trace_count,
            trace_log_frequency=trace_log_frequency,
            process=link.given.place if link and count > 1 else None,
        ),
        max_buffered_bytes=None if max_buffered_mib is None else max_buffered_mib * 2**20,
        drain_s=drain_seconds,
        transport=transport,
        shared_memory=shared_memory,
        response_cache_mib=response_cache_mib,
        latencies=_latencies(metrics_config),
        forwarded=ForwardedHeaders(
            grpc=_pattern("--grpc-header-forward-pattern", grpc_header_forward_pattern),
            http=_pattern("--http-header-forward-pattern", http_header_forward_pattern),
        ),
        processes=count,
        http=rest if http else None,
        security=SecurityOptions(
            tls=TlsOptions(
                certificate=tls_cert,
                key=tls_key,
                client_authorities=tls_client_ca,
                peer_authorities=tls_peer_ca,
                peer_name=tls_peer_name,
            )
            if tls_cert and tls_key
            else None,
            token_file=token_file,
            admin_port=admin_port,
            admin_socket=admin_socket,
            client_limits=None if limits == ClientLimits() else limits,
            grpc_restricted=_restricted("--grpc-restricted-protocol", grpc_restricted_protocol, GRPC_PREFIX),
            http_restricted=_restricted("--http-restricted-api", http_restricted_api),
        ),
    )
    ignore_hang_up()
    log_to_standard_error(log_format, options.observe.process)
    as_text = partial(print_text, scheme="https" if tls_cert else "http")
    report: Callable[[StartupReport], None] = print_json if as_json or log_format is LineFormat.JSON else as_text
    if link and link.restarts:
        report = partial(log_restart, restarts=link.restarts)
    elif link and link.given.place > 1:
        report = log_start
    trust = Trust(
        torch_archives=trust_torch_archives, python_models=trust_python_models, custom_operators=trust_custom_operators
    )
    with _failures_logged_as(log_format):
        if becomes_supervisor:
            check_room(count)
            become_supervisor(addresses(options), count, log_format)
        _check_device(required=require_gpu)
        _run(options, partial(report_startup, report), link, trust)


@contextmanager
def _failures_logged_as(log_format: LineFormat) -> Iterator[None]:
    """Log why the server cannot start as JSON too: a reader of JSON logs would lose the line of text."""
    try:
        yield
    except tuple(EXIT_CODES) as error:
        if log_format is LineFormat.TEXT:
            raise
        logger.error("%s", error)  # noqa: TRY400  (the text says it all)
        raise typer.Exit(next(code for kind, code in EXIT_CODES.items() if isinstance(error, kind))) from None


def _place(path: str, storage_folder: Path | None, storage_gib: float) -> Path | ObjectStorage:
    if not is_url(path):
        if storage_folder is not None:
            raise typer.BadParameter(f"--storage-folder is for object storage, and {path} is on this disk; leave it out")
        return Path(path)
    return ObjectStorage(url=path, folder=storage_folder or default_folder(), max_bytes=int(storage_gib * 2**30))


def _more_places(path: str, more_paths: Sequence[str]) -> tuple[Path, ...]:
    for one in (path, *more_paths):
        if more_paths and is_url(one):
            raise typer.BadParameter(f"{one} is in object storage, which is the only PATH then; start a server for each")
    return tuple(map(Path, more_paths))


def _restricted(option: str, texts: list[str] | None, prefix: str = "") -> tuple[RestrictedGroup, ...]:
    try:
        return tuple(restricted_group(text, prefix) for text in texts or ())
    except ValueError as error:
        raise typer.BadParameter(f"{option} {error}") from None


def _pattern(option: str, text: str | None) -> HeaderPattern | None:
    try:
        return HeaderPattern(text) if text else None
    except ValueError as error:
        raise typer.BadParameter(f"{option} {error}") from None


def _latencies(settings: list[str] | None) -> LatencyFigures:
    try:
        return latency_figures(settings or ())
    except ValueError as error:
        raise typer.BadParameter(f"--metrics-config {error}") from None


def _origin(text: str) -> str:
    try:
        return checked_origin(text)
    except ValueError as error:
        raise typer.BadParameter(f"--http-allowed-origin {error}") from None


def _check_without_http(
    http_port: int | None, metrics_port: int | None, allowed_hosts: list[str] | None, allowed_origins: list[str] | None
) -> None:
    for option, is_given in (
        ("--http-port", http_port is not None),
        ("--metrics-port", metrics_port is not None and metrics_port >= 0),
        ("--http-allowed-host", bool(allowed_hosts)),
        ("--http-allowed-origin", bool(allowed_origins)),
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


def _process_count(text: str, *, use_gpu: bool) -> int:
    try:
        return process_count(text, use_gpu=use_gpu)
    except ValueError as error:
        raise typer.BadParameter(f"--processes {error}") from None


def _check_device(*, required: bool) -> None:
    """Look for the device that models will need: with --model-control explicit there may be none of them yet."""
    if required and not device_count():
        raise FailedPreconditionError("--require-gpu: there is no CUDA device here (is the NVIDIA driver installed?)")


def _check_supervised(option: str, transport: TransportName) -> None:
    if sys.platform == "win32":
        raise typer.BadParameter(f"{option} needs processes that inherit sockets, which Windows does not have; leave it out")
    if transport is TransportName.GRPCIO:
        raise typer.BadParameter(f"{option} needs --transport nghttp2: grpcio cannot take over sockets; leave one of them out")


def _run(
    options: ServerOptions,
    on_ready: Callable[[StartupReport], None],
    link: SupervisorLink | None,
    trust: Trust,
) -> None:
    # Imported here, so that `halfserve serve --help` does not wait for the runtimes.
    from halfserve.serve.backends.runtimes import probing_runtimes  # noqa: PLC0415  (see above)
    from halfserve.serve.server import serve as serve_until_signal  # noqa: PLC0415  (the command has its name)

    runtimes = probing_runtimes(trust)
    with asyncio.Runner(loop_factory=_fastest_loop()) as runner:
        try:
            runner.run(serve_until_signal(options, runtimes, on_ready, link))
        except LostDeviceError:
            leave_at_once(LOST_DEVICE_CODE)  # the cleanup of a driver that lost its device may never return
    leave_threads_behind()


def _fastest_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop  # noqa: PLC0415  (has no wheel for Windows)
    except ModuleNotFoundError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
