"""Options of the log, the access log, traces and captured requests."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from halfserve.serve.log_handler import LineFormat
from halfserve.serve.observability.observe_options import AccessLog, ObserveOptions, TraceLevel

_observing = partial(typer.Option, rich_help_panel="Observing")
_capturing = partial(typer.Option, rich_help_panel="Capturing requests")


@dataclass(frozen=True, kw_only=True)
class Observing:
    """Options of what a server writes about its requests."""

    access_log: Annotated[
        AccessLog, _observing(help="Requests to log as JSON lines; sampled: every error and some answers.")
    ] = ObserveOptions.access_log
    access_log_file: Annotated[Path | None, _observing(help="File of the access log; standard error without one.")] = (
        ObserveOptions.access_log_file
    )
    access_log_every: Annotated[int, _observing(min=1, help="With --access-log sampled: log one answer in this many.")] = (
        ObserveOptions.access_log_every
    )
    log_verbose: Annotated[
        int,
        _observing(min=0, help="From 1 on, log debugging messages, those of Python models too."),
    ] = ObserveOptions.log_verbose
    log_format: Annotated[
        LineFormat,
        _observing(help="Format of log lines: text, or JSON objects; json prints the ready line as JSON too."),
    ] = LineFormat.TEXT
    trace_to: Annotated[
        str,
        _observing(
            help="Traces: 'otlp' (OTEL_* variables say where), a file of OpenTelemetry's JSON, or triton:FILE in Triton's.",
            show_default=False,
        ),
    ] = ObserveOptions.trace_to
    trace_level: Annotated[
        TraceLevel, _observing(help="OFF traces nothing until a client changes the trace settings.", case_sensitive=False)
    ] = ObserveOptions.trace_level
    trace_rate: Annotated[int, _observing(min=1, help="Trace one request in this many, unless its headers decide.")] = (
        ObserveOptions.trace_rate
    )
    trace_count: Annotated[int, _observing(min=-1, help="Stop after this many traces; -1 means no limit.")] = (
        ObserveOptions.trace_count
    )
    trace_log_frequency: Annotated[
        int, _observing(min=0, help="Begin a new file (FILE.0, FILE.1, ...) after this many traces; 0 puts all in FILE.")
    ] = ObserveOptions.trace_log_frequency
    capture: Annotated[
        Path | None, _capturing(help="Folder for the tensors of some requests, for replay and proofs.", show_default=False)
    ] = ObserveOptions.capture
    capture_share: Annotated[
        float,
        _capturing(min=0, max=1, help="Share of requests to capture, unless a model sets halfserve.capture."),
    ] = ObserveOptions.capture_share
    capture_max_mib: Annotated[
        int, _capturing(min=64, help="Most MiB of captured requests on disk; the oldest are deleted.")
    ] = ObserveOptions.capture_max_mib

    def observe(self, process: int | None) -> ObserveOptions:
        """Access log, traces and capture of the process with this number; None if it is the only one."""
        given = {name: value for name, value in vars(self).items() if name != "log_format"}
        return ObserveOptions(process=process, **given)
