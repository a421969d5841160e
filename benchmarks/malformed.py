"""Sends malformed messages to a server: each must get the status that the protocol's rules demand, and none may do harm.

    python -m benchmarks.malformed --count 100000

A server in a process of its own gets, over gRPC, HTTP/2 by hand and REST: requests with bytes changed, cut off or made up;
wrong models, datatypes, shapes, byte counts, parameters and contents; broken gRPC frames, compression flags and headers; frames
that break HTTP/2; bodies that are no requests. The right answer is derived from the message itself, without the server;
changed bytes that happen to be a valid request must get the right values. Good requests continue meanwhile over a connection
of their own. Exits with 1 if an answer was wrong, or the server was harmed.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.malforming.counts import Counts
from benchmarks.malforming.interfaces import save_interfaces
from benchmarks.malforming.sending import send_all
from benchmarks.soaking.judgement import TRACEBACK
from benchmarks.soaking.process_watch import Sample, look
from benchmarks.soaking.server_process import ServerProcess, server_process
from halfserve.serve.benchmark.load.http2_connection import ConnectionLostError

WARM_UP_PART = 10  # growth is measured after 1/10 of the count, as a server allocates at first
SPARE_DESCRIPTORS, SPARE_THREADS = 2, 4
MAX_GROWN_MB = 16.0
STOP_S = 60.0
SETTLE_S = 5.0  # time for the server to notice that its clients have gone


def main(
    count: Annotated[int, typer.Option(min=1000, help="Malformed messages, at least.")] = 100_000,
    seed: Annotated[int, typer.Option(help="Of the random choices; the same one sends the same messages.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Send the messages and judge the answers."""
    counts, good = Counts(), Counts()
    with tempfile.TemporaryDirectory() as folder:
        save_interfaces(Path(folder))
        with server_process(Path(folder)) as server:
            began = time.monotonic()
            samples: list[Sample] = []
            try:
                for part, number in enumerate((count // WARM_UP_PART, count - count // WARM_UP_PART)):
                    send_all(server, counts.total + number, seed + part, counts, good)
                    samples.append(_settled(server.process.pid, samples))
            except (ConnectionLostError, FileNotFoundError) as error:
                counts.complaints.append(f"the server hung up on a call that breaks no rule of HTTP/2, or has ended: {error}")
            seconds = time.monotonic() - began
            _end(server, counts)
    figures = _figures(counts, good, samples, seconds)
    if as_json:
        typer.echo(json.dumps(figures))
    else:
        _print(figures, counts)
    raise typer.Exit(1 if figures["complaints"] else 0)


def _settled(pid: int, before: list[Sample]) -> Sample:
    """Sample the server once it has no more open descriptors than before, or after a time limit."""
    ends = time.monotonic() + SETTLE_S
    while True:
        sample = look(pid)
        if not before or sample.descriptors <= before[0].descriptors + SPARE_DESCRIPTORS or time.monotonic() > ends:
            return sample
        time.sleep(0.02)


def _end(server: ServerProcess, counts: Counts) -> None:
    """End the server, and check its exit code and log."""
    server.process.terminate()
    code = server.process.wait(STOP_S)
    if code != 0:
        counts.complaints.append(f"the server ended with code {code}, expected 0")
    log = server.log_text()
    if TRACEBACK in log:
        counts.complaints.append("the server's log holds a stack trace:\n" + log[log.index(TRACEBACK) :][:3000])


def _figures(counts: Counts, good: Counts, samples: list[Sample], seconds: float) -> dict[str, object]:
    complaints = [*counts.complaints, *good.complaints]
    figures: dict[str, object] = {
        "messages": counts.total,
        "right": counts.right.total(),
        "wrong": counts.wrong.total(),
        "good_requests": good.total,
        "seconds": round(seconds, 1),
        "messages_per_second": round(counts.total / seconds),
        "calls_by_status": dict(sorted(counts.statuses.items())),
        "by_kind": counts.by_kind(),
    }
    if len(samples) == 2:
        before, after = samples
        figures["resident_mb"] = [round(before.resident_mb, 1), round(after.resident_mb, 1)]
        if after.resident_mb > before.resident_mb + MAX_GROWN_MB:
            complaints.append(f"memory went from {before.resident_mb:.0f} to {after.resident_mb:.0f} MB")
        for what, spare in (("descriptors", SPARE_DESCRIPTORS), ("threads", SPARE_THREADS)):
            figures[what] = [getattr(before, what), getattr(after, what)]
            if getattr(after, what) > getattr(before, what) + spare:
                complaints.append(f"{what}: {getattr(before, what)} -> {getattr(after, what)}")
    return figures | {"complaints": complaints}


def _print(figures: dict[str, object], counts: Counts) -> None:
    console, table = Console(), Table("kind", "messages", "right", "wrong")
    for kind, (right, wrong) in counts.by_kind().items():
        table.add_row(kind, f"{right + wrong:,}", f"{right:,}", f"{wrong:,}")
    console.print(table)
    for key, value in figures.items():
        if key not in {"by_kind", "complaints"}:
            console.print(f"{key.replace('_', ' ')}: {value}", highlight=False)
    complaints = figures["complaints"]
    for text in complaints if isinstance(complaints, list) else []:
        console.print(text, style="red", markup=False, highlight=False)


if __name__ == "__main__":
    typer.run(main)
