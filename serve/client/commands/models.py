"""`halfserve models`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.live import Live

from serve.client.commands.connection_options import (
    ADDRESS,
    TIMEOUT_S,
    Address,
    AsJson,
    Credentials,
    Retries,
    Timeout,
    connect,
    takes_credentials,
)
from serve.client.commands.console import PipedConsole
from serve.client.commands.display import models_table, provider_of, tensors_json
from serve.client.commands.input_files import InputArgumentError
from serve.client.commands.watch import Look, looked_at, looks_json, looks_table
from serve.client.errors import ModelNotFound
from serve.client.inference_client import InferenceClient


@takes_credentials
def models(
    names: Annotated[list[str] | None, typer.Argument(metavar="MODEL", help="Only these; without, all.")] = None,
    *,
    load: Annotated[list[str] | None, typer.Option(help="Load this model, or load it anew; before listing.")] = None,
    config: Annotated[Path | None, typer.Option(help="JSON file with a ModelConfig for --load, instead of its own.")] = None,
    unload: Annotated[list[str] | None, typer.Option(help="Stop serving this model; after --load, before listing.")] = None,
    wait: Annotated[
        float | None, typer.Option(help="Wait so many seconds for the models, or the server, to be ready.", min=0.001)
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show what the models do, again and again, until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between two looks, with --watch.", min=0.01, max=86_400)] = 1.0,
    times: Annotated[int | None, typer.Option(help="End after so many looks, with --watch.", min=1)] = None,
    address: Address = ADDRESS,
    timeout: Timeout = TIMEOUT_S,
    retries: Retries = 0,
    credentials: Credentials,
    as_json: AsJson = False,
) -> None:
    """List the models of a running server: version, state, provider, inputs and outputs; load and unload them; watch them.

    Example: halfserve models --load digits --wait 30
    """
    both = sorted({*(load or ())} & {*(unload or ())})
    if both:
        raise InputArgumentError(f"--load and --unload both name {both[0]!r}; --load alone loads a model anew")
    override = None if config is None else _config_text(config, load)
    with connect(address, credentials, timeout=timeout, retries=retries) as client:
        if wait is not None and not load:
            _wait(client, names, wait)
        for name in load or ():
            client.load_model(name, config=override, timeout_s=max(timeout, wait or 0.0))
        for name in unload or ():
            client.unload_model(name, timeout_s=max(timeout, wait or 0.0))
        if wait is not None and load:
            _wait(client, load, wait)
        if watch:
            _watch(client, names or (), every, times, as_json=as_json)
        else:
            _list(client, names or (), as_json=as_json)


def _wait(client: InferenceClient, names: Sequence[str] | None, wait_s: float) -> None:
    end_s = time.monotonic() + wait_s
    every_model: list[str | None] = [*names] if names else [None]
    for name in every_model:
        client.wait_until_ready(name, timeout_s=max(0.001, end_s - time.monotonic()))


def _list(client: InferenceClient, names: Sequence[str], *, as_json: bool) -> None:
    entries = [entry for entry in client.models() if not names or entry.name in names]
    for name in names:
        if all(entry.name != name for entry in entries):
            raise ModelNotFound(f"the server's repository has no model {name!r}; `halfserve models` lists what it has")
    rows = [_model_row(client, entry.name, entry.version, entry.state, entry.reason) for entry in entries]
    if as_json:
        typer.echo(json.dumps({"models": rows}))
    else:
        PipedConsole().print(models_table(rows))


def _model_row(client: InferenceClient, name: str, version: str, state: str, reason: str) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "version": version, "state": state, "reason": reason, "platform": "", "provider": None}
    empty = row | {"inputs": [], "outputs": []}
    if state != "READY":
        # A model that is not loaded has a name and a reason, and nothing else to tell.
        return empty
    try:
        metadata, config = client.model_metadata(name, version), client.model_config(name, version)
    except ModelNotFound:
        return empty | {"state": "UNAVAILABLE", "reason": "unloaded meanwhile"}
    return row | {
        "platform": metadata.platform,
        "provider": provider_of(config),
        "inputs": tensors_json(metadata.inputs),
        "outputs": tensors_json(metadata.outputs),
    }


def _watch(client: InferenceClient, names: Sequence[str], every_s: float, times: int | None, *, as_json: bool) -> None:
    def look() -> Look:
        return looked_at(client.statistics(), names, time.monotonic())

    console = PipedConsole(quiet=as_json)
    before, shown = look(), 0
    # Where nobody sees it change, each look has a table of its own.
    with Live(console=console, auto_refresh=False) if console.is_terminal and not as_json else nullcontext() as live:
        while times is None or shown < times:
            time.sleep(every_s)
            now = look()
            if as_json:
                typer.echo(json.dumps(looks_json(before, now)))
                sys.stdout.flush()
            elif live is None:
                console.print(looks_table(before, now))
            else:
                live.update(looks_table(before, now), refresh=True)
            before, shown = now, shown + 1


def _config_text(path: Path, load: Sequence[str] | None) -> str:
    if len(load or ()) != 1:
        raise InputArgumentError("--config is for one --load; give both, once")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputArgumentError(f"--config {path}: cannot be read: {error}; expected a JSON file") from None
