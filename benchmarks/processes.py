"""Cost of several server processes behind one port, compared with one: processor time of a request, and memory.

    python -m benchmarks.processes model.onnx --counts 1,2
    python -m benchmarks.processes model.onnx --counts 1,2 --each --rate 800
    python -m benchmarks.processes small.onnx --counts 1,2,16 --rounds 3

All servers are started, and loaded in turn, A B A B ..., over several connections. Processor time is that of all threads of
a server's processes, including the supervisor but not the load generator; the number of requests is counted by the server.
Memory is proportional (PSS): pages that processes share are counted once. With the same load, each of two processes sees half
of it and forms batches of half the size, which cost more per request; with --each, each process gets the load of a single one.
More processes than cores show the cost of the shared parts; for that the model should compute almost nothing. The results are
medians, also of the ratio within a round.
"""

from __future__ import annotations

import json
import statistics
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.harness.loaded_server import LoadedServer
from benchmarks.harness.process_watch import process_tree, proportional_kib
from benchmarks.harness.server_process import ServerProcess, server_process
from halfserve import Client
from halfserve.serve.benchmark.level import Load
from halfserve.serve.benchmark.measurement import Measurement

QUERIES = 3
# Heading, name and format of each figure.
COLUMNS = {
    "us a request": ("request_us", ".1f"),
    "against the first": ("ratio", ".2f"),
    "requests/s": ("per_second", ".0f"),
    "p99 ms": ("p99_ms", ".2f"),
    "rows a batch": ("rows", ".1f"),
    "busiest": ("busiest_share", ".0%"),
    "MiB": ("memory_mib", ".0f"),
    "statistics ms": ("statistics_ms", ".1f"),
    "metrics ms": ("metrics_ms", ".1f"),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """Results of one server under load."""

    request_us: float  # processor time of all its processes for one request, in microseconds
    per_second: float  # requests a second
    p99_ms: float  # 99th percentile of the latency, in milliseconds
    rows: float  # mean rows of a batch; each process forms its own batches
    busiest_share: float  # fraction of the processor time used by the busiest process; a half is even with two
    memory_mib: float  # PSS of all processes, in MiB
    statistics_ms: float  # time of a ModelStatistics call, in milliseconds
    metrics_ms: float  # time of a scrape of the metrics, in milliseconds


def main(
    model: Annotated[Path, typer.Argument(exists=True, help="An .onnx file, or a repository with one model.")],
    counts: Annotated[str, typer.Option(help="Numbers of processes, the one to compare with first.")] = "1,2",
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 32,
    rate: Annotated[float | None, typer.Option(min=1, help="Requests a second, in place of some in flight.")] = None,
    connections: Annotated[int, typer.Option(min=1, help="Over which they go.")] = 8,
    starts: Annotated[int, typer.Option(min=1, help="How often the servers are started.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="Loads of each, for each start.")] = 10,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of one load.")] = 0.7,
    *,
    each: Annotated[bool, typer.Option("--each", help="So many requests and connections for each process.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure servers with these numbers of processes in turn, and print medians."""
    numbers = [int(number) for number in counts.split(",")]
    runs: dict[int, list[Run]] = {number: [] for number in numbers}
    for _ in track(range(starts), description="measuring", console=Console(stderr=True)):
        with ExitStack() as stack:
            servers = {}
            for number in numbers:
                process = stack.enter_context(server_process(model, "--processes", str(number)))
                servers[number] = stack.enter_context(Server(process))
            for _ in range(rounds):
                for number, server in servers.items():
                    times = number if each else 1
                    how = Measurement(seconds=seconds, warmup_s=0.2, connections=connections * times)
                    load = Load(concurrency=concurrency * times) if rate is None else Load(rate=rate * times)
                    runs[number].append(server.run(load, how))
    medians = {
        number: {one.name: statistics.median(getattr(run, one.name) for run in of_number) for one in fields(Run)}
        for number, of_number in runs.items()
    }
    for number, row in medians.items():
        pairs = zip(runs[number], runs[numbers[0]], strict=True)
        row["ratio"] = statistics.median(run.request_us / first.request_us for run, first in pairs)
    if as_json:
        print(
            json.dumps({"medians": medians, "runs": {number: [asdict(run) for run in these] for number, these in runs.items()}})
        )
        return
    table = Table("processes", *COLUMNS)
    for number, row in medians.items():
        table.add_row(str(number), *(format(row[name], form) for name, form in COLUMNS.values()))
    Console().print(table)


class Server(LoadedServer):
    """A server of several processes, and a load generator that is connected to it."""

    def __init__(self, server: ServerProcess) -> None:
        with Client(server.address) as client:
            name = client.models()[0].name
        super().__init__(server.address, name, process_tree(server.process.pid))
        self._http_address = server.http_address

    def run(self, load: Load, how: Measurement) -> Run:
        """Load the server once and return the results."""
        level, spent = self.measured(load, how)
        return Run(
            request_us=sum(spent),
            per_second=level.requests_per_second,
            p99_ms=level.percentile_ms(99),
            rows=(level.server and level.server.mean_batch_size) or 0.0,
            busiest_share=max(spent) / sum(spent),
            memory_mib=sum(map(proportional_kib, self.pids)) / 1024,
            statistics_ms=_milliseconds(self.client.statistics),
            metrics_ms=_milliseconds(lambda: _scrape(self._http_address)),
        )


def _milliseconds(ask: Callable[[], object]) -> float:
    times = []
    for _ in range(QUERIES):
        began = time.perf_counter()
        ask()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


def _scrape(address: str) -> None:
    with urllib.request.urlopen(f"http://{address}/metrics") as answer:
        answer.read()


if __name__ == "__main__":
    typer.run(main)
