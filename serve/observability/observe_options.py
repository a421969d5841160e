"""Options of the access log and traces at the start, and the destination of traces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path

from halfserve.installation import install_hint
from halfserve.serve.engine.errors import FailedPreconditionError

UNBOUNDED = -1
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
OTLP = "otlp"  # a destination of traces besides files
TRITON = "triton:"  # before the path of a file in Triton's own format
OTLP_PACKAGE = "opentelemetry.exporter.otlp.proto.grpc"


class AccessLog(StrEnum):
    """The requests that get a line in the access log. SAMPLED logs every error, and one in `access_log_every` answers."""

    OFF = "off"
    ERRORS = "errors"
    SAMPLED = "sampled"
    ALL = "all"


class TraceLevel(StrEnum):
    """Level of traces at the start: TIMESTAMPS traces requests, OFF none."""

    OFF = "OFF"
    TIMESTAMPS = "TIMESTAMPS"


@dataclass(frozen=True, kw_only=True)
class ObserveOptions:
    """Access log and traces at the start. All settings but the destinations can be changed while the server runs.

    Attributes:
        log_verbose: level of verbosity of the log; from 1 on, debugging messages are written.
        access_log: selects the requests that are logged.
        access_log_file: gets one JSON object per line; None is standard error.
        access_log_every: under SAMPLED, one in this many answered requests is logged.
        trace_to: "otlp" (to the collector that the OTEL_* environment variables name), the path of a file of OpenTelemetry's
            JSON, "triton:" and the path of a file in Triton's own format, or "" for no traces.
        trace_level: OFF traces nothing until a client changes the level.
        trace_rate: one in this many requests is traced, unless its caller has sent a decision.
        trace_count: most traces in all; -1 is no limit.
        trace_log_frequency: traces in one file before the next one begins; 0 puts all in one.
        capture: folder of captured requests; None captures none.
        capture_share: share of each model's requests that is captured, unless its configuration has `halfserve.capture`.
        capture_max_mib: most MiB of captured requests; the oldest are deleted.
        process: number of this server process among the writers of the same files; None if it is the only one.
    """

    log_verbose: int = 0
    access_log: AccessLog = AccessLog.OFF
    access_log_file: Path | None = None
    access_log_every: int = 100
    trace_to: str = ""
    trace_level: TraceLevel = TraceLevel.TIMESTAMPS
    trace_rate: int = 1000
    trace_count: int = UNBOUNDED
    trace_log_frequency: int = 0
    capture: Path | None = None
    capture_share: float = 0.01
    capture_max_mib: int = 1024
    process: int | None = None


def destination(options: ObserveOptions, environment: Mapping[str, str]) -> str:
    """Return the destination of traces: OTLP, a path, TRITON and a path, or "" for none."""
    named = any(environment.get(name) for name in ENDPOINTS) or environment.get("OTEL_TRACES_EXPORTER") == OTLP
    return options.trace_to or (OTLP if named else "")


def is_tritons(to: str) -> bool:
    """Return whether a destination of traces is a file in Triton's own format."""
    return to.startswith(TRITON)


def file_of(to: str) -> str:
    """Return the path of a destination; "" for one that is no file."""
    return "" if to == OTLP else to.removeprefix(TRITON)


def check_can_trace(to: str) -> None:
    """Check that traces have a destination, and the packages that they need.

    Raises:
        FailedPreconditionError: there is no destination, or a package is missing.
    """
    if not to:
        raise FailedPreconditionError(
            "traces have nowhere to go; start the server with --trace-to FILE or --trace-to otlp, "
            "or with OTEL_EXPORTER_OTLP_ENDPOINT set"
        )
    packages = () if is_tritons(to) else ("opentelemetry.sdk.trace", *([OTLP_PACKAGE] if to == OTLP else []))
    for package in packages:
        try:
            found = find_spec(package) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            raise FailedPreconditionError(f"traces need OpenTelemetry; {install_hint('trace')}")
