"""Load several running KServe v2 servers in turn and print medians and ratios against the last one named.

    halfserve serve model.onnx --grpc-port 8001            # here, say
    python benchmarks/serving.py ours=127.0.0.1:8001/model peer=127.0.0.1:18001/model --rounds 5

One server is loaded at a time, A B A B ..., so that a drift in the machine's speed falls on all of them. The load is that of
`halfserve bench`: closed loop, one process, requests of one row prepared beforehand.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from serve.benchmark.cli import parse_concurrencies
from serve.benchmark.level import Level
from serve.benchmark.load_generator import LoadGenerator
from serve.benchmark.request_inputs import RequestPlan, parse_shapes
from serve.benchmark.sweep import Sweep, run_sweep
from serve.client import InferenceClient


@dataclass(frozen=True)
class Contestant:
    """One server under test, with its load generator."""

    name: str
    model: str
    client: InferenceClient
    generator: LoadGenerator

    def measure(self, concurrency: int, seconds: float) -> Level:
        """One level, after a short warm-up."""
        sweep = Sweep(
            model=self.model,
            version="",
            batch_size=1,
            concurrencies=[concurrency],
            seconds=seconds,
            requests=None,
            warmup_s=0.3,
            timeout_s=30.0,
        )
        (level,) = run_sweep(sweep, self.client, self.generator)
        return level


def main(
    servers: Annotated[list[str], typer.Argument(metavar="NAME=HOST:PORT/MODEL", help="The peer last.")],
    concurrency: Annotated[str, typer.Option(help="Requests in flight, one level after the other.")] = "1,4,16,64",
    rounds: Annotated[int, typer.Option(min=1, help="How often each server is measured at each level.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of one measurement.")] = 2.0,
    shape: Annotated[list[str] | None, typer.Option(help="NAME:SIZES without the batch, for variable sizes.")] = None,
) -> None:
    """Measure the servers in turn and print medians over the rounds."""
    levels = parse_concurrencies(concurrency)
    shapes = parse_shapes(shape or [])
    table = Table("in flight", "server", "requests/s", "p50 ms", "p99 ms", "mean batch", "rate ratio", "p99 ratio")
    with ExitStack() as stack:
        contestants = [_contestant(text, shapes, stack) for text in servers]
        for level in track(levels, description="measuring", console=Console(stderr=True)):
            runs = [{c.name: c.measure(level, seconds) for c in contestants} for _ in range(rounds)]
            for cells in _rows(runs, contestants[-1].name):
                table.add_row(str(level), *cells)
    Console().print(table)


def _contestant(text: str, shapes: dict[str, list[int]], stack: ExitStack) -> Contestant:
    name, _, rest = text.partition("=")
    address, _, model = rest.partition("/")
    if not (name and address and model):
        raise typer.BadParameter(f"{text!r}: expected NAME=HOST:PORT/MODEL, such as ours=127.0.0.1:8001/mlp")
    client = stack.enter_context(InferenceClient(address))
    metadata, config = client.model_metadata(model), client.model_config(model)
    plan = RequestPlan(
        metadata=metadata, max_batch_size=config.max_batch_size, batch_size=1, shapes=shapes, given={}, version=""
    )
    return Contestant(name, model, client, stack.enter_context(LoadGenerator(address, plan.serialized())))


def _rows(runs: list[dict[str, Level]], peer: str) -> Iterator[list[str]]:
    for name in runs[0]:
        levels = [run[name] for run in runs]
        batches = [level.server.mean_batch_size for level in levels if level.server and level.server.mean_batch_size]
        yield [
            name,
            f"{statistics.median(level.requests_per_second for level in levels):.0f}",
            f"{statistics.median(level.latency.p50 for level in levels):.2f}",
            f"{statistics.median(level.latency.p99 for level in levels):.2f}",
            f"{statistics.median(batches):.1f}" if batches else "-",
            f"{statistics.median(run[name].requests_per_second / run[peer].requests_per_second for run in runs):.2f}",
            f"{statistics.median(run[name].latency.p99 / run[peer].latency.p99 for run in runs):.2f}",
        ]


if __name__ == "__main__":
    typer.run(main)
