"""Reports the start of a server, as text for people and as JSON for programs."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import typer

from halfserve.compiled_build import build_in_use
from halfserve.serve.engine.model import Model
from halfserve.serve.log_handler import time_stamp
from halfserve.serve.transports.listening import address_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StartupReport:
    """Models and ports of a started server."""

    models: Sequence[Model]  # loaded models
    host: str  # host as given in the options
    grpc_port: int | None  # gRPC port; None without gRPC
    seconds: float  # time from the start of loading until requests are accepted
    http_port: int | None = None  # port of the REST interface and the page; None without them
    metrics_port: int | None = None  # port of the metrics only; None without such a port
    admin_port: int | None = None  # port of the RPCs that change the server; None without such a port
    processes: int = 1  # number of servers behind these ports


def report_startup(write: Callable[[StartupReport], None], report: StartupReport) -> None:
    """Write the report. A closed or full standard output does not end the server."""
    try:
        write(report)
    except OSError as error:
        # Buffered output would fail again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        port = "no gRPC port" if report.grpc_port is None else f"gRPC on port {report.grpc_port}"
        logger.warning("serving, %s; standard output cannot be written to: %s", port, error.strerror)


def print_text(report: StartupReport, scheme: str) -> None:
    """Print the report as text; `scheme` is "http" or "https"."""
    for model in report.models:
        batch = f"batches of up to {model.max_batch_size}" if model.max_batch_size else "no batching"
        verdict = f", certificate {model.verdict}" if model.verdict else ""
        typer.echo(f"{model.name}/{model.version}  {model.provider}, {model.precision}, {batch}{verdict}")
        if model.measured:
            typer.echo(f"  measured: {model.measured}")
        for line in () if model.composition is None else model.composition.parts:
            typer.echo(f"  {line}")
    if report.http_port is not None:
        metrics = "" if report.metrics_port is None else f", metrics on {address_of(report.host, report.metrics_port)}"
        typer.echo(f"REST and a page on {scheme}://{address_of(report.host, report.http_port)}/{metrics}")
    elif report.metrics_port is not None:
        typer.echo(f"metrics on {address_of(report.host, report.metrics_port)}")
    if report.admin_port is not None:
        typer.echo(f"administration on {address_of(report.host, report.admin_port)}")
    typer.echo(f"server code {build_in_use()}")
    processes = f", {report.processes} processes" if report.processes > 1 else ""
    grpc = "no gRPC" if report.grpc_port is None else f"gRPC on {address_of(report.host, report.grpc_port)}"
    typer.echo(f"{grpc}{processes}, ready in {report.seconds:.2f} s; Ctrl-C stops")


def log_start(report: StartupReport) -> None:
    """Log that a further process serves; the first one prints the report once all do."""
    logger.info("serving, ready in %.2f s", report.seconds)


def log_restart(report: StartupReport, restarts: int) -> None:
    """Log that a restarted worker serves; the first one printed the report, whose addresses are still valid."""
    logger.warning("serving again, ready in %.2f s; restarts: %d", report.seconds, restarts)


def _details(model: Model) -> dict[str, Any]:
    """Details that only some models have: the steps of an ensemble, and the measurements of a trial."""
    parts = {} if model.composition is None else {"steps": list(model.composition.parts)}
    return {**parts, "measured": model.measured} if model.measured else parts


def print_json(report: StartupReport) -> None:
    """Print one JSON object on one line, which also fits into a JSON log."""
    fields = ("name", "version", "provider", "precision", "max_batch_size")
    build = build_in_use()
    content = {
        "time": time_stamp(time.time()),
        "level": "INFO",
        "message": "ready",
        "build": build.name,
        "build_reason": build.reason,
        "host": report.host,
        "grpc_port": report.grpc_port,
        "http_port": report.http_port,
        "metrics_port": report.metrics_port,
        "admin_port": report.admin_port,
        "processes": report.processes,
        "seconds": round(report.seconds, 3),
        "models": [{field: getattr(model, field) for field in fields} | _details(model) for model in report.models],
    }
    typer.echo(json.dumps(content))
