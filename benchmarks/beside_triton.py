"""Requests a second, p99 and processor time of running servers, loaded in turn by the programs that clients use.

    halfserve serve mlp.onnx --threads 1 --grpc-port 8001      # process 71, say; and Triton on port 18001 as process 72
    python -m benchmarks.beside_triton ours=127.0.0.1:8001/mlp@71 triton=127.0.0.1:18001/mlp@72
    python -m benchmarks.beside_triton ... --loads perf_analyzer:1 --perf-analyzer-options '--shared-memory system'

One server is loaded at a time, A B A B ..., so that a drift in the machine's speed falls on all of them. A load is
PROGRAM:NUMBERS:

- h2load:4x16 sends over 4 connections with 16 streams each. It is light enough to show what a server can take.
- perf_analyzer:16 keeps 16 requests in flight. It needs about a core for itself.
- rate:2000x1000 sends 2,000 requests a second at random times over 1,000 connections (halfserve's own load generator).
- tritonclient:16, tritonclient.aio:16, halfserve:16 and halfserve.aio:16 are Python clients with 16 requests in flight.

The table shows medians over the rounds; ratios are medians of the ratio to the last server within a round. Processor time is
that of all threads of the server and its child processes, for one request.
"""

from __future__ import annotations

import csv
import math
import re
import shlex
import statistics
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.harness.loaded_server import LoadedServer
from benchmarks.harness.process_watch import process_tree
from halfserve.serve.benchmark.level import Load
from halfserve.serve.benchmark.load_target import RequestSettings
from halfserve.serve.benchmark.measurement import Measurement, measure
from halfserve.serve.benchmark.request_inputs import parse_shapes

LOADS = "h2load:1x1,h2load:1x16,h2load:4x16,h2load:16x4,perf_analyzer:1,perf_analyzer:4,perf_analyzer:16,perf_analyzer:64"
WARM_UP_S = 1  # connecting is not measured
PATH = "/inference.GRPCInferenceService/ModelInfer"


@dataclass(frozen=True)
class Result:
    """Result of one load; p99 is None where the program does not report it."""

    per_second: float
    p99_us: float | None
    processor_us: float


class RunningServer(LoadedServer):
    """A server that listens at `address`, with its processes and a file with a framed request for `model`."""

    def __init__(self, name: str, address: str, model: str, pid: int, settings: RequestSettings, folder: Path) -> None:
        super().__init__(address, model, process_tree(pid), settings)
        self.name, self.address, self.model = name, address, model
        message = self.requests[0][1].SerializeToString()
        self.request = folder / "request.bin"
        self.request.write_bytes(b"\0" + struct.pack(">I", len(message)) + message)


@dataclass(frozen=True)
class Settings:
    """Length of a measurement in seconds, and the program and options of perf_analyzer."""

    seconds: float
    perf_analyzer: str
    options: str


def main(
    servers: Annotated[list[str], typer.Argument(metavar="NAME=HOST:PORT/MODEL@PID", help="Running servers, the peer last.")],
    loads: Annotated[str, typer.Option(help="Loads as PROGRAM:NUMBERS, separated by commas.")] = LOADS,
    rounds: Annotated[int, typer.Option(min=1, help="How often each server is measured with each load.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of one measurement in seconds.")] = 2.0,
    shape: Annotated[list[str] | None, typer.Option(help="NAME:SIZES without the batch, for variable sizes.")] = None,
    perf_analyzer: Annotated[str, typer.Option(help="The program of perf_analyzer.")] = "perf_analyzer",
    perf_analyzer_options: Annotated[str, typer.Option(help="Further options for perf_analyzer.")] = "",
) -> None:
    """Load the servers in turn and print medians over the rounds."""
    settings = Settings(seconds, perf_analyzer, perf_analyzer_options)
    table = Table("load", "server", "requests/s", "p99 us", "processor us", "rate", "p99", "processor")
    with ExitStack() as stack:
        running = [_server(text, RequestSettings(shapes=parse_shapes(shape or [])), stack) for text in servers]
        for load in track(loads.split(","), description="measuring", console=Console(stderr=True)):
            results = [[_measured(load, server, settings) for server in running] for _ in range(rounds)]
            for index, server in enumerate(running):
                table.add_row(load, server.name, *_cells([(row[index], row[-1]) for row in results]))
    Console(width=100).print(table)


def _server(text: str, settings: RequestSettings, stack: ExitStack) -> RunningServer:
    parsed = re.fullmatch(r"([^=]+)=([^/]+)/([^@]+)@(\d+)", text)
    if parsed is None or not Path(f"/proc/{parsed[4]}").exists():
        raise typer.BadParameter(
            f"{text!r}: expected NAME=HOST:PORT/MODEL@PID of a running server, such as ours=127.0.0.1:8001/mlp@71"
        )
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    return stack.enter_context(RunningServer(parsed[1], parsed[2], parsed[3], int(parsed[4]), settings, folder))


def _measured(load: str, server: RunningServer, settings: Settings) -> Result:
    program, _, numbers = load.partition(":")
    try:
        run = PROGRAMS[program]
    except KeyError:
        raise typer.BadParameter(f"--loads {load}: expected one of {', '.join(PROGRAMS)}, then : and its numbers") from None
    (per_second, p99_us), spent_us = server.costs(lambda: run(numbers, server, settings))
    return Result(per_second, p99_us, sum(spent_us))


def _h2load(numbers: str, server: RunningServer, settings: Settings) -> tuple[float, float | None]:
    connections, streams = numbers.split("x")
    headers = ("-H", "content-type: application/grpc", "-H", "te: trailers")
    lasting = ("-D", str(math.ceil(settings.seconds)), "--warm-up-time", str(WARM_UP_S))
    url = f"http://{server.address}{PATH}"
    printed = _output(["h2load", "-t1", "-c", connections, "-m", streams, *lasting, *headers, "-d", str(server.request), url])
    rate = re.search(r"([\d.]+) req/s", printed)
    failed = re.search(r"(\d+) failed, (\d+) errored, (\d+) timeout", printed)
    if rate is None or failed is None or any(map(int, failed.groups())):
        raise typer.BadParameter(f"h2load reports failed requests:\n{printed[-1500:]}")
    return float(rate[1]), None


def _perf_analyzer(numbers: str, server: RunningServer, settings: Settings) -> tuple[float, float | None]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.csv"
        interval = str(int(settings.seconds * 1000))
        command = (settings.perf_analyzer, "-m", server.model, "-u", server.address, "-i", "grpc", "-a", "-f", str(report))
        level = ("--concurrency-range", f"{numbers}:{numbers}", "--stability-percentage", "999", "--percentile", "99")
        window = ("--measurement-mode", "time_windows", "--measurement-interval", interval, "--max-trials", "3")
        printed = _output([*command, *level, *window, *shlex.split(settings.options)])
        if not report.exists():
            raise typer.BadParameter(f"perf_analyzer wrote no report:\n{printed[-1500:]}")
        row = next(csv.DictReader(report.open(encoding="utf-8")))
    return float(row["Inferences/Second"]), float(row["p99 latency"])


def _rate(numbers: str, server: RunningServer, settings: Settings) -> tuple[float, float | None]:
    rate, connections = map(int, numbers.split("x"))
    how = Measurement(seconds=settings.seconds, warmup_s=WARM_UP_S, connections=connections)
    level = measure(server.bench, Load(rate=rate), how)
    return level.requests_per_second, level.percentile_ms(99) * 1e3


def _python_client(library: str) -> Callable[[str, RunningServer, Settings], tuple[float, float | None]]:
    def run(numbers: str, server: RunningServer, settings: Settings) -> tuple[float, float | None]:
        arguments = (library, server.address, str(server.request), numbers, str(settings.seconds))
        per_second, p99_us = map(float, _output([sys.executable, "-m", "benchmarks.python_clients", *arguments]).split())
        return per_second, p99_us

    return run


PROGRAMS = {
    "h2load": _h2load,
    "perf_analyzer": _perf_analyzer,
    "rate": _rate,
    **{library: _python_client(library) for library in ("tritonclient", "tritonclient.aio", "halfserve", "halfserve.aio")},
}


def _output(command: Sequence[str]) -> str:
    """Run a program and return its standard output."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise typer.BadParameter(f"{command[0]} failed:\n{done.stdout[-1500:]}{done.stderr[-1500:]}")
    return done.stdout


def _cells(pairs: Sequence[tuple[Result, Result]]) -> list[str]:
    """Return a row of the table: medians of the results, and of their ratios to the peer's."""

    def median(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    def ratios(of: Callable[[Result], float | None]) -> Iterable[float | None]:
        return (one and other and one / other for one, other in ((of(mine), of(peer)) for mine, peer in pairs))

    columns: list[Callable[[Result], float | None]] = [lambda r: r.per_second, lambda r: r.p99_us, lambda r: r.processor_us]
    plain = [median(of(mine) for mine, _ in pairs) for of in columns]
    beside = [median(ratios(of)) for of in columns]
    shown = [(value, ".0f") for value in plain] + [(value, ".2f") for value in beside]
    return ["-" if value is None else format(value, form) for value, form in shown]


if __name__ == "__main__":
    typer.run(main)
