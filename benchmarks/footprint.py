"""Cost of `halfserve serve` before the first request: time until it takes requests, memory, and memory of idle connections.

python -m benchmarks.footprint model.onnx
"""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, cast

import typer

# The first bytes of an HTTP/2 client: the preface and an empty SETTINGS frame (RFC 9113, section 3.4).
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)


@dataclass(frozen=True)
class Start:
    """One start of the server.

    Attributes:
        ready_ms: time from the start of the process to the ready line, in milliseconds.
        resident_mb: resident memory at that time, in MB.
        connections_mb: additional memory of the idle connections, in MB.
    """

    ready_ms: float
    resident_mb: float
    connections_mb: float


def resident_kb(pid: int) -> int:
    """Resident memory of a process, in kB."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))


@contextmanager
def idle_connections(port: int, count: int) -> Iterator[None]:
    """Open connections that exchange HTTP/2's first frames with the server and then stay silent."""
    with ExitStack() as stack:
        for _ in range(count):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            client.sendall(GREETING)
            if not client.recv(4096):
                raise SystemExit("the server closed an idle connection")
        yield


def start(model: Path, connections: int) -> Start:
    """Start a server on a free port, measure it, and stop it."""
    command = [sys.executable, "-m", "halfserve", "serve", str(model), "--grpc-port", "0", "--json"]
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        line = cast("IO[str]", server.stdout).readline()
        if not line:
            raise SystemExit("the server did not start; its message is above")
        ready_ms = (time.monotonic() - began) * 1e3
        before = resident_kb(server.pid)
        with idle_connections(json.loads(line)["grpc_port"], connections):
            after = resident_kb(server.pid)
        server.terminate()
    return Start(ready_ms, before / 1e3, (after - before) / 1e3)


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
