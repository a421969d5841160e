"""What a started server says of itself, for people and for programs."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable

import typer

from serve.server import Ready
from serve.transports.listening import address_of

logger = logging.getLogger(__name__)


def told(tell: Callable[[Ready], None], ready: Ready) -> None:
    """Tell that the server is ready. Where nobody reads that, or the disk is full, it serves all the same."""
    try:
        tell(ready)
    except OSError as error:
        # What is still in the buffer would fail again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        logger.warning("serving, gRPC on port %d; standard output cannot be written to: %s", ready.grpc_port, error.strerror)


def print_text(ready: Ready, scheme: str) -> None:
    """Lines for people; `scheme` is "http" or "https"."""
    for model in ready.models:
        batch = f"batches of up to {model.max_batch_size}" if model.max_batch_size else "no batching"
        typer.echo(f"{model.name}/{model.version}  {model.provider}, {model.precision}, {batch}")
    if ready.http_port is not None:
        metrics = "" if ready.metrics_port is None else f", metrics on {address_of(ready.host, ready.metrics_port)}"
        typer.echo(f"REST and a page on {scheme}://{address_of(ready.host, ready.http_port)}/{metrics}")
    if ready.admin_port is not None:
        typer.echo(f"administration on {address_of(ready.host, ready.admin_port)}")
    typer.echo(f"gRPC on {address_of(ready.host, ready.grpc_port)}, ready in {ready.seconds:.2f} s; Ctrl-C stops")


def tell_again(ready: Ready, restarts: int) -> None:
    """Who reads standard output has been told at the first start, and nothing of it has changed."""
    logger.warning("serving again, ready in %.2f s; restarts: %d", ready.seconds, restarts)


def print_json(ready: Ready) -> None:
    """One JSON object on one line."""
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
    line = {
        "host": ready.host,
        "grpc_port": ready.grpc_port,
        "http_port": ready.http_port,
        "metrics_port": ready.metrics_port,
        "admin_port": ready.admin_port,
        "seconds": round(ready.seconds, 3),
        "models": models,
    }
    typer.echo(json.dumps(line))
