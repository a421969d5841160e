"""Share of the model's own speed that serving keeps: rows per second of the server and of a bare `session.run`.

python -m benchmarks.bare_session resnet.onnx

The bare session runs prepared batches, in fp32 on the CPU as the server does, at the fastest batch size. The server forms
batches of that size, and runs beside one load generator. Both are measured in turn, A B A B ...
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.harness.server_process import server_process
from halfserve.serve.backends.onnx_runtime.onnx_interface import read_interface
from halfserve.serve.backends.onnx_runtime.session import SessionOpener
from halfserve.serve.benchmark.level import Load
from halfserve.serve.benchmark.load_target import LoadTarget, RequestSettings
from halfserve.serve.benchmark.measurement import Measurement, measure
from halfserve.serve.engine.backend import DevicePlacement


class Bare:
    """A session that only this process uses."""

    def __init__(self, model: Path, threads: int) -> None:
        """Open the model as the server would.

        Args:
            model: model file with a batch dimension and no other variable dimension.
            threads: CPU threads of one operator.
        """
        self._session = SessionOpener(path=model, placement=DevicePlacement(threads=threads)).open().session
        self._inputs = {
            value.name: (spec.shape[1:], value.type)
            for spec, value in zip(read_interface(model).inputs, self._session.get_inputs(), strict=True)
        }

    def rows_per_second(self, rows: int, seconds: float) -> float:
        """Run batches of this size one after the other."""
        random = np.random.default_rng(0)
        dtypes = {"tensor(float16)": np.float16, "tensor(float)": np.float32}
        feeds = {
            name: random.standard_normal((rows, *shape)).astype(dtypes[kind]) for name, (shape, kind) in self._inputs.items()
        }
        self._session.run(None, feeds)
        batches, began = 0, time.monotonic()
        while (took := time.monotonic() - began) < seconds:
            self._session.run(None, feeds)
            batches += 1
        return batches * rows / took


@contextmanager
def served(
    model: Path,
    rows: int,
    threads: int,
    options: RequestSettings | None = None,
    flags: Sequence[str] = (),
    placement: str = "--cpu",
) -> Iterator[LoadTarget]:
    """Run `halfserve serve` in a process of its own, with a load target for it.

    Args:
        model: model file.
        rows: largest batch in rows.
        threads: CPU threads of one operator.
        options: contents of the requests.
        flags: further options of the command.
        placement: "--cpu" or "--require-gpu".
    """
    size = ("--max-batch-size", str(rows))
    with (
        server_process(model, *size, *flags, placement=placement, threads=threads) as server,
        LoadTarget(server.address, [model.stem], options or RequestSettings()) as contestant,
    ):
        yield contestant


def main(
    model: Path,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of one measurement.")] = 4.0,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads of one operator; 0 lets the runtime choose.")] = 1,
    sizes: Annotated[str, typer.Option(help="Batch sizes to try.")] = "1,2,4,8,16,32",
) -> None:
    """Find the best batch size, then measure both in turn."""
    bare = Bare(model, threads)
    rates = {size: bare.rows_per_second(size, seconds / 4) for size in map(int, sizes.split(","))}
    best = max(rates, key=lambda size: rates[size])
    print("bare, rows/s by batch size: " + ", ".join(f"{size}: {rate:.0f}" for size, rate in rates.items()))
    with served(model, best, threads) as contestant:
        how = Measurement(seconds=seconds, warmup_s=0.5)
        pairs = []
        for _ in range(rounds):
            alone = bare.rows_per_second(best, seconds)
            level = measure(contestant.bench, Load(concurrency=max(4, 3 * best)), how)
            pairs.append((alone, level.requests_per_second))
    ratio = statistics.median(by_server / alone for alone, by_server in pairs)
    alone, by_server = (statistics.median(pair[i] for pair in pairs) for i in range(2))
    print(f"batches of {best}: bare {alone:.0f} rows/s, served {by_server:.0f}, ratio {ratio:.3f} (medians of {rounds})")


if __name__ == "__main__":
    typer.run(main)
