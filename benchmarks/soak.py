"""Checks that a server stays stable: load, reloads, bad input and faults for a given time, with every answer checked.

    python -m benchmarks.soak --seconds 120
    python -m benchmarks.soak --seconds 120 --think 0.05 --pause 1    (beside other work: a third of a core)

The server runs in a process of its own. Clients send single requests, streams, and requests through shared memory; one client
reloads models, sends bad and mangled messages, disconnects early, stops the process for a moment and makes a model hang. Exits
with 1 if an answer was wrong or missing, an error unclear, or if memory, files or threads increased.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import grpc
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.soaking.clients import clients
from benchmarks.soaking.fault_injection import Scene, keep_at_it
from benchmarks.soaking.judgement import Report, report
from benchmarks.soaking.models import save_models
from benchmarks.soaking.process_watch import look, watch, write_samples
from benchmarks.soaking.server_process import ServerProcess, server_process
from benchmarks.soaking.tally import Tally
from halfserve import Client

SAMPLE_S = 0.25
LISTED = 10


def main(
    seconds: Annotated[float, typer.Option(min=5, help="How long.")] = 120.0,
    count: Annotated[int, typer.Option("--clients", min=1, help="Clients that ask one thing after the other.")] = 6,
    pause_s: Annotated[float, typer.Option("--pause", min=0.0, help="Seconds from one injected fault to the next.")] = 0.2,
    think_s: Annotated[float, typer.Option("--think", min=0.0, help="Seconds that a client waits after an answer.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the random choices.")] = 0,
    samples: Annotated[Path | None, typer.Option(help="Write memory, files, threads and processor time there, as CSV.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Soak a server and judge it."""
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder) / "models"
        save_models(repository)
        log = Path(folder) / "access.log"
        options = ("--model-control", "explicit", "--load-model", "*", "--shared-memory", "--access-log", "all")
        with server_process(repository, *options, "--access-log-file", str(log)) as server:
            result = _soak(server, seconds, _Load(count, think_s, pause_s, seed), samples)
            server.process.terminate()
            code = server.process.wait(60)
        result = result.ended(code)
    if as_json:
        typer.echo(json.dumps(result.figures | {"complaints": list(result.complaints)}))
    else:
        _print(result)
    raise typer.Exit(0 if result.is_good else 1)


@dataclass(frozen=True)
class _Load:
    """Amount of load and faults; see the options of `main`."""

    clients: int
    think_s: float
    pause_s: float
    seed: int


def _soak(server: ServerProcess, seconds: float, load: _Load, keep: Path | None) -> Report:
    tally, stop, samples = Tally(), threading.Event(), [look(server.process.pid)]
    with grpc.insecure_channel(server.address) as channel, Client(server.address, retries=0) as client:
        scene = Scene(server.address, server.process.pid, client, channel, np.random.default_rng(load.seed), tally)
        threads = [
            *clients(server.address, load.clients, load.think_s, stop, tally),
            threading.Thread(target=keep_at_it, args=(scene, load.pause_s, stop), name="fault injection"),
            threading.Thread(target=watch, args=(server.process.pid, SAMPLE_S, stop, samples), name="watch"),
        ]
        started = time.monotonic()
        for thread in threads:
            thread.start()
        while time.monotonic() < started + seconds and server.process.poll() is None:
            time.sleep(min(SAMPLE_S, seconds))
        stop.set()
        for thread in threads:
            thread.join()
        if keep is not None:
            write_samples(keep, samples)
        return report(tally.counted(), samples, scene.recoveries_s, started, time.monotonic(), server.log_text())


def _print(result: Report) -> None:
    console = Console()
    table = Table("figure", "value")
    for key, value in result.figures.items():
        if not isinstance(value, dict | list):
            table.add_row(key.replace("_", " "), f"{value:,}" if isinstance(value, int | float) else str(value))
        elif isinstance(value, dict):
            table.add_row(key.replace("_", " "), ", ".join(f"{name} {number:,}" for name, number in value.items()))
    console.print(table)
    for text in result.complaints[:LISTED]:
        console.print(text, style="red", markup=False, highlight=False)
    console.print("good" if result.is_good else f"{len(result.complaints)} complaints")


if __name__ == "__main__":
    typer.run(main)
