"""`halfserve models`: list, load, unload and watch the models of a server."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.live import Live
from rich.table import Table

from halfserve.option_groups import takes_option_groups
from halfserve.protos.inference_pb2 import ModelStatistics
from halfserve.serve.client.cli.connection_options import AsJson, Connection
from halfserve.serve.client.cli.display import (
    PipedConsole,
    computation_of,
    models_table,
    provider_of,
    short_names,
    steps_of,
    tensors_json,
)
from halfserve.serve.client.cli.inputs import InputArgumentError
from halfserve.serve.client.client import Client
from halfserve.serve.client.errors import ModelNotFound

Key = tuple[str, str]  # model, version
NS_PER_MS = 1e6
LONGEST_NAME = 20  # longest name of a model beside its figures


@dataclass(frozen=True, kw_only=True)
class StatisticsSnapshot:
    models: Mapping[Key, ModelStatistics]  # statistics by model name and version
    at_s: float  # time of the snapshot on the monotonic clock


def snapshot_of(statistics: Iterable[ModelStatistics], names: Sequence[str], at_s: float) -> StatisticsSnapshot:
    """Statistics of the models of these names; of all models if no name is given."""
    return StatisticsSnapshot(models={(s.name, s.version): s for s in statistics if not names or s.name in names}, at_s=at_s)


def activity_json(before: StatisticsSnapshot, now: StatisticsSnapshot) -> dict[str, Any]:
    """{"seconds", "models": [{"name", "version", "requests_per_s", "rows_per_s", "failures_per_s", "mean_batch", ...}]}."""
    seconds = max(now.at_s - before.at_s, 1e-9)
    rows = [_row(before.models.get(key), model, seconds) for key, model in sorted(now.models.items())]
    return {"seconds": round(seconds, 3), "models": rows}


def activity_table(before: StatisticsSnapshot, now: StatisticsSnapshot) -> Table:
    """Return one line per model version; times are means of the requests in between."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("model", no_wrap=True)
    for heading in ("requests/s", "rows/s", "errors/s", "batch", "queue ms", "compute ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    rows = activity_json(before, now)["models"]
    shown = short_names(table, [f"{row['name']}/{row['version']}" for row in rows], LONGEST_NAME, "model")
    for row in rows:
        rates = (f"{row[key]:,.0f}" for key in ("requests_per_s", "rows_per_s", "failures_per_s"))
        means = ("-" if row[key] is None else f"{row[key]:.2f}" for key in ("mean_batch", "queue_ms", "compute_ms"))
        table.add_row(shown[f"{row['name']}/{row['version']}"], *rates, *means)
    return table


def _row(before: ModelStatistics | None, now: ModelStatistics, seconds: float) -> dict[str, Any]:
    # The counters of a model that was reloaded between the snapshots start at 0.
    if before is None or before.inference_count > now.inference_count:
        before = ModelStatistics()
    past, present = before.inference_stats, now.inference_stats
    requests = present.success.count - past.success.count
    rows, batches = now.inference_count - before.inference_count, now.execution_count - before.execution_count
    compute_ns = sum(
        getattr(present, stage).ns - getattr(past, stage).ns for stage in ("compute_input", "compute_infer", "compute_output")
    )
    return {
        "name": now.name,
        "version": now.version,
        "requests_per_s": round(requests / seconds, 1),
        "rows_per_s": round(rows / seconds, 1),
        "failures_per_s": round((present.fail.count - past.fail.count) / seconds, 1),
        "mean_batch": _mean(rows, batches),
        "queue_ms": _mean((present.queue.ns - past.queue.ns) / NS_PER_MS, requests),
        "compute_ms": _mean(compute_ns / NS_PER_MS, requests),
    }


def _mean(total: float, count: int) -> float | None:
    return round(total / count, 3) if count else None


@takes_option_groups
def models(
    names: Annotated[list[str] | None, typer.Argument(metavar="MODEL", help="List these models only; by default all.")] = None,
    *,
    load: Annotated[list[str] | None, typer.Option(help="Load this model, or load it again, before the list.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="JSON file with a ModelConfig for --load, in place of config.pbtxt.")
    ] = None,
    unload: Annotated[list[str] | None, typer.Option(help="Stop serving this model, after --load and before the list.")] = None,
    wait: Annotated[
        float | None, typer.Option(help="Seconds to wait for the models, or the server, to be ready.", min=0.001)
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show each model's rates and times repeatedly, until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between two tables of --watch.", min=0.01, max=86_400)] = 1.0,
    times: Annotated[int | None, typer.Option(help="End --watch after this many tables.", min=1)] = None,
    connection: Connection,
    as_json: AsJson = False,
) -> None:
    """List the models of a running server: version, state, provider, inputs and outputs; load and unload them; watch them.

    Example: halfserve models --load digits --wait 30
    """
    both = sorted({*(load or ())} & {*(unload or ())})
    if both:
        raise InputArgumentError(f"--load and --unload both name {both[0]!r}; --load alone loads a model again")
    override = None if config is None else _config_text(config, load)
    timeout_s = max(connection.timeout, wait or 0.0)
    with connection.client() as client:
        if wait is not None and not load:
            _wait(client, names, wait)
        for name in load or ():
            client.load_model(name, config=override, timeout_s=timeout_s)
        for name in unload or ():
            client.unload_model(name, timeout_s=timeout_s)
        if wait is not None and load:
            _wait(client, load, wait)
        if watch:
            _watch(client, names or (), every, times, as_json=as_json)
        else:
            _list(client, names or (), as_json=as_json)


def _wait(client: Client, names: Sequence[str] | None, wait_s: float) -> None:
    end_s = time.monotonic() + wait_s
    every_model: list[str | None] = [*names] if names else [None]
    for name in every_model:
        client.wait_until_ready(name, timeout_s=max(0.001, end_s - time.monotonic()))


def _list(client: Client, names: Sequence[str], *, as_json: bool) -> None:
    entries = [entry for entry in client.models() if not names or entry.name in names]
    for name in names:
        if all(entry.name != name for entry in entries):
            raise ModelNotFound(f"the server's repository has no model {name!r}; `halfserve models` lists what it has")
    rows = [_model_row(client, entry.name, entry.version, entry.state, entry.reason) for entry in entries]
    if as_json:
        typer.echo(json.dumps({"models": rows}))
    else:
        PipedConsole().print(models_table(rows))


def _model_row(client: Client, name: str, version: str, state: str, reason: str) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "version": version, "state": state, "reason": reason, "platform": "", "provider": None}
    empty = row | {"inputs": [], "outputs": []}
    if state != "READY":
        return empty
    try:
        metadata, config = client.model_metadata(name, version), client.model_config(name, version)
    except ModelNotFound:
        return empty | {"state": "UNAVAILABLE", "reason": "unloaded meanwhile"}
    return (
        row
        | {
            "platform": metadata.platform,
            "provider": provider_of(config),
            "inputs": tensors_json(metadata.inputs),
            "outputs": tensors_json(metadata.outputs),
        }
        | computation_of(config)
        | ({"steps": steps} if (steps := steps_of(config)) else {})
    )


def _watch(client: Client, names: Sequence[str], every_s: float, times: int | None, *, as_json: bool) -> None:
    def snapshot() -> StatisticsSnapshot:
        return snapshot_of(client.statistics(), names, time.monotonic())

    console = PipedConsole(quiet=as_json)
    before, shown = snapshot(), 0
    # Output that is no terminal gets a table per snapshot.
    with Live(console=console, auto_refresh=False) if console.is_terminal and not as_json else nullcontext() as live:
        while times is None or shown < times:
            time.sleep(every_s)
            now = snapshot()
            if as_json:
                typer.echo(json.dumps(activity_json(before, now)))
                sys.stdout.flush()
            elif live is None:
                console.print(activity_table(before, now))
            else:
                live.update(activity_table(before, now), refresh=True)
            before, shown = now, shown + 1


def _config_text(path: Path, load: Sequence[str] | None) -> str:
    if len(load or ()) != 1:
        raise InputArgumentError("--config is for one --load; give both, once")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputArgumentError(f"--config {path}: cannot be read: {error}; expected a JSON file") from None
