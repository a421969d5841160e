"""The options of `halfserve serve`, by the heading that its help shows them under."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from serve.model_control.options import ControlMode
from serve.observability.options import AccessLog
from serve.transports.transport import TransportName

HTTP_PORT, METRICS_PORT = 8000, 8002
MAX_ROWS = 2**31 - 1  # what a model's config holds
HOUR_US = 3_600_000_000
MAX_THREADS = 4096  # the runtime starts as many as it is told

_listening = partial(typer.Option, rich_help_panel="Listening")

Host = Annotated[str, _listening(help="Address to listen on; 0.0.0.0 for all.")]
GrpcPort = Annotated[int, _listening(min=0, max=65535, help="gRPC port; 0 finds a free one.")]
Http = Annotated[bool, _listening("--http/--no-http", help="Serve REST, the page and metrics too.")]
HttpPort = Annotated[
    int | None,
    _listening(
        min=0,
        max=65535,
        help=f"Port of REST and the page, {HTTP_PORT} by default; 0 finds a free one, as --grpc-port 0 does.",
        show_default=False,
    ),
]
MetricsPort = Annotated[
    int | None,
    _listening(
        min=-1,
        max=65535,
        help=f"Port of the metrics alone, {METRICS_PORT} by default; 0 finds a free one, -1 has none.",
        show_default=False,
    ),
]
MaxBufferedMib = Annotated[
    int | None,
    _listening(
        min=4,
        help="MiB of unanswered requests and unread answers, over all clients. By default 256, or a sixteenth of the memory "
        "that the process may use if that is less.",
        show_default=False,
    ),
]
HttpAllowedHost = Annotated[
    list[str] | None,
    _listening(help="A name by which browsers may address this server; may be repeated."),
]
Transport = Annotated[
    TransportName,
    _listening(help="What carries gRPC: libnghttp2 (fast) or grpcio's server (the reference)."),
]
SharedMemory = Annotated[
    bool,
    _listening(
        "--shared-memory",
        help="Let clients on this machine leave tensors in shared memory (the system's, or a CUDA device's).",
    ),
]

_models = partial(typer.Option, rich_help_panel="Models")

ModelControl = Annotated[
    ControlMode,
    _models(
        help="Which models are served: what PATH holds at the start (none), at any time (poll), "
        "or what RepositoryModelLoad asks for (explicit)."
    ),
]
LoadModel = Annotated[
    list[str] | None,
    _models(help="Model to load at the start with --model-control explicit; may be repeated, '*' is all."),
]
PollSeconds = Annotated[float, _models(min=0.1, help="Seconds between two looks with --model-control poll.")]
WarmUpSeconds = Annotated[
    float,
    _models(min=0, help="Time for trying out a model's batch sizes before it serves."),
]
LoadSeconds = Annotated[
    float,
    _models(
        min=1,
        max=86400,
        help="Time for loading a model version and trying it out; if that hangs, it is refused, and others can be loaded.",
    ),
]
KeepGoing = Annotated[
    bool,
    _models("--keep-going", help="Start with the models that can be served where one cannot."),
]
ModelUploads = Annotated[
    bool,
    _models("--model-uploads", help="Let load requests bring ONNX models and label files along (--model-control explicit)."),
]
TrustTorchArchives = Annotated[
    bool,
    _models(
        "--trust-torch-archives",
        help="Serve .pt2 files of PATH too. This trusts everybody who writes there: such a file can run any code as this user.",
    ),
]

_batching = partial(typer.Option, rich_help_panel="Batching")

MaxBatchSize = Annotated[int, _batching(min=1, max=MAX_ROWS, help="Rows in one batch, where the model's config does not say.")]
MaxQueueDelayUs = Annotated[
    int,
    _batching(min=0, max=HOUR_US, help="Microseconds a request may wait for others, where the model's config does not say."),
]
MaxQueueSize = Annotated[
    int, _batching(min=1, help="Requests that may wait for one model, where the model's config does not say.")
]
MaxQueueMib = Annotated[int, _batching(min=1, help="MiB that these may hold.")]

_computing = partial(typer.Option, rich_help_panel="Computing")

ComputeSlots = Annotated[
    int,
    _computing(
        min=0, help="Batches computed at once on the CPU over all models, handed out fairly; 0 leaves it to the system."
    ),
]
Threads = Annotated[int, _computing(min=0, max=MAX_THREADS, help="CPU threads of one operator; 0 lets the runtime choose.")]
Cpu = Annotated[bool, _computing("--cpu", help="Stay on the CPU even where there is a GPU.")]
RequireGpu = Annotated[bool, _computing("--require-gpu", help="Refuse to start without a GPU.")]

_observing = partial(typer.Option, rich_help_panel="Observing")

AccessLogChoice = Annotated[
    AccessLog,
    _observing(help="Requests to log as JSON lines; sampled: every error and some answers."),
]
AccessLogFile = Annotated[Path | None, _observing(help="File of the access log; standard error without one.")]
AccessLogEvery = Annotated[int, _observing(min=1, help="Of sampled answers, one in so many.")]
TraceTo = Annotated[
    str,
    _observing(help="OpenTelemetry traces: 'otlp' (OTEL_* variables say where) or a file.", show_default=False),
]
TraceRate = Annotated[int, _observing(min=1, help="One request in so many is traced, unless its caller decides.")]

_security = partial(typer.Option, rich_help_panel="Security")

TlsCert = Annotated[Path | None, _security(help="PEM file of the server's certificate chain; turns TLS on, for REST too.")]
TlsKey = Annotated[Path | None, _security(help="PEM file of its private key.")]
TlsClientCa = Annotated[Path | None, _security(help="PEM file of who may have signed clients' certificates (mTLS).")]
TokenFile = Annotated[
    Path | None, _security(help="Lines that `halfserve token` prints; who has none of these tokens is not let in.")
]
AdminPort = Annotated[
    int | None, _security(min=0, max=65535, help="Port for loading, unloading and settings, refused elsewhere then.")
]
AdminSocket = Annotated[Path | None, _security(help="The same on a Unix socket that only this user can open.")]
ClientRate = Annotated[float | None, _security(min=0.001, help="Requests a second that one token or address may send.")]
ClientBurst = Annotated[int | None, _security(min=1, help="Of these at once after a pause.")]
ClientConcurrency = Annotated[int | None, _security(min=1, help="Requests in progress of one token or address.")]

_ending = partial(typer.Option, rich_help_panel="Ending")

LameDuckSeconds = Annotated[
    float,
    _ending(min=0, help="After SIGTERM, say for so long that the server is not ready, and serve on."),
]
DrainSeconds = Annotated[float, _ending(min=0.1, help="Time for requests in flight after SIGTERM.")]
Supervise = Annotated[
    bool,
    _ending("--supervise", help="Serve in a worker process, and start it anew when it ends; clients keep the address."),
]
