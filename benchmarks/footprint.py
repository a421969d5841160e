"""Cost of `halfserve serve` before the first request: time until it takes requests, memory, and memory of idle connections.

python -m benchmarks.footprint model.onnx
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness.http2_frames import PREFACE, SETTINGS, connected, frame
from benchmarks.harness.process_watch import look
from benchmarks.harness.server_process import server_process


@dataclass(frozen=True)
class Start:
    """One start of the server."""

    ready_ms: float  # time from the start of the process to the ready line, in milliseconds
    resident_mb: float  # resident memory at that time, in MB
    connections_mb: float  # additional memory of the idle connections, in MB


@contextmanager
def idle_connections(address: str, count: int) -> Iterator[None]:
    """Open connections that exchange HTTP/2's first frames with the server and then stay silent."""
    with ExitStack() as stack:
        for _ in range(count):
            client = stack.enter_context(connected(address))
            client.sendall(PREFACE + frame(SETTINGS, 0, 0, b""))
            if not client.recv(4096):
                raise SystemExit("the server closed an idle connection")
        yield


def start(model: Path, connections: int) -> Start:
    """Start a server on a free port, measure it, and stop it."""
    began = time.monotonic()
    with server_process(model, threads=0) as server:
        ready_ms = (time.monotonic() - began) * 1e3
        before = look(server.process.pid).resident_mb
        with idle_connections(server.address, connections):
            after = look(server.process.pid).resident_mb
    return Start(ready_ms, before, after - before)


def main(
    model: Path,
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    connections: Annotated[int, typer.Option(min=0, help="Idle clients to connect.")] = 1000,
) -> None:
    """Start the server repeatedly and print the medians."""
    start(model, 0)  # fills the file cache
    starts = [start(model, connections) for _ in range(rounds)]
    ready_ms = statistics.median(run.ready_ms for run in starts)
    resident_mb = statistics.median(run.resident_mb for run in starts)
    connections_mb = statistics.median(run.connections_mb for run in starts)
    print(
        f"ready after {ready_ms:.0f} ms, {resident_mb:.0f} MB resident, "
        f"{connections:,} idle connections add {connections_mb:.1f} MB (medians of {rounds})"
    )


if __name__ == "__main__":
    typer.run(main)
