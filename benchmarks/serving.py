"""Load several running KServe v2 servers in turn and print medians and ratios against the last one named.

    halfserve serve model.onnx --grpc-port 8001            # here, say
    python benchmarks/serving.py ours=127.0.0.1:8001/model peer=127.0.0.1:18001/model --rounds 5

One server is loaded at a time, A B A B ..., so that a drift in the machine's speed falls on all of them. The load is that of
`halfserve bench`: closed loop, requests of one row prepared beforehand. `halfserve bench MODEL --against HOST:PORT/MODEL` does
the same for one pair, and compares the answers too.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from halfserve.serve.benchmark.comparison import ComparedLevel, compare
from halfserve.serve.benchmark.level import Level, Load, parse_concurrencies
from halfserve.serve.benchmark.load_target import LoadTarget, RequestSettings
from halfserve.serve.benchmark.measurement import Measurement, measure
from halfserve.serve.benchmark.request_inputs import parse_shapes

HEADINGS = ("load", "server", "requests/s", "p50 ms", "p99 ms", "mean batch", "rate ratio", "p99 ratio")


def main(
    servers: Annotated[list[str], typer.Argument(metavar="NAME=HOST:PORT/MODEL", help="The peer last.")],
    concurrency: Annotated[str, typer.Option(help="Requests in flight, one level after the other.")] = "1,4,16,64",
    rounds: Annotated[int, typer.Option(min=1, help="How often each server is measured at each level.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of one measurement.")] = 2.0,
    shape: Annotated[list[str] | None, typer.Option(help="NAME:SIZES without the batch, for variable sizes.")] = None,
    *,
    shared_memory: Annotated[bool, typer.Option("--shared-memory", help="Tensors in system shared memory.")] = False,
) -> None:
    """Measure the servers in turn and print medians over the rounds."""
    options = RequestSettings(shapes=parse_shapes(shape or []), shared_memory="system" if shared_memory else None)
    how = Measurement(seconds=seconds, warmup_s=0.3)
    table = Table(*HEADINGS)
    with ExitStack() as stack:
        names, targets = zip(*(contestant(text, options, stack) for text in servers), strict=True)

        def measured(number: int, load: Load) -> Level:
            target: LoadTarget = targets[number]
            return measure(target.bench, load, how)

        for number in track(parse_concurrencies(concurrency), description="measuring", console=Console(stderr=True)):
            for line in compare(names, Load(concurrency=number), rounds, measured, base=-1):
                table.add_row(*cells(line))
    Console().print(table)


def contestant(text: str, options: RequestSettings, stack: ExitStack) -> tuple[str, LoadTarget]:
    """The name and the running server of NAME=HOST:PORT/MODEL."""
    name, _, rest = text.partition("=")
    address, _, model = rest.partition("/")
    if not (name and address and model):
        raise typer.BadParameter(f"{text!r}: expected NAME=HOST:PORT/MODEL, such as ours=127.0.0.1:8001/mlp")
    return name, stack.enter_context(LoadTarget(address, [model], options))


def cells(line: ComparedLevel) -> list[str]:
    """A row of the table, in the order of HEADINGS."""
    return [
        line.load.text,
        line.name,
        f"{line.per_second.median:.0f}",
        f"{line.p50_ms.median:.2f}",
        f"{line.p99_ms.median:.2f}",
        "-" if line.mean_batch_size is None else f"{line.mean_batch_size:.1f}",
        line.rate_ratio.text,
        line.p99_ratio.text,
    ]


if __name__ == "__main__":
    typer.run(main)
