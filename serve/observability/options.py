"""What to observe of a server, and where to put it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class AccessLog(StrEnum):
    """Which requests get a line in the access log. SAMPLED is every error and one answer in so many."""

    OFF = "off"
    ERRORS = "errors"
    SAMPLED = "sampled"
    ALL = "all"


@dataclass(frozen=True, kw_only=True)
class ObserveOptions:
    """How to observe. Everything here can be changed while the server runs, but for the places.

    Attributes:
        access_log: which requests are logged.
        access_log_file: gets one JSON object a line; None is standard error.
        access_log_every: under SAMPLED, one answered request in so many is logged.
        trace_to: "otlp" (where the OTEL_* environment variables say), the path of a file, or "" for no traces.
        trace_rate: one request in so many is traced, where its caller has not decided on it.
        trace_count: so many traces at most; -1 is no bound.
        trace_log_frequency: traces in one file before the next is begun; 0 puts all in one.
    """

    access_log: AccessLog = AccessLog.OFF
    access_log_file: Path | None = None
    access_log_every: int = 100
    trace_to: str = ""
    trace_rate: int = 1000
    trace_count: int = -1
    trace_log_frequency: int = 0
