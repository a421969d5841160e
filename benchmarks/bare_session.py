"""Share of the model's own speed that serving keeps: rows per second of the server and of a bare session.

python -m benchmarks.bare_session resnet.onnx

The bare session runs prepared batches, in fp32 on the CPU as the server does, at the fastest batch size; a batch's time is the
median. The server forms batches of that size, and runs beside one load generator. Both are measured in turn, A B A B ...
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.cuda_device.ways import Alone
from benchmarks.harness.server_process import served
from halfserve.serve.benchmark.level import Load
from halfserve.serve.benchmark.measurement import Measurement, measure
from halfserve.serve.engine.backend import DevicePlacement


class Bare(Alone):
    """A session that only this process uses, of a model with a batch dimension and no other variable dimension."""

    def rows_per_second(self, rows: int, seconds: float) -> float:
        """Run batches of this size one after the other."""
        random = np.random.default_rng(0)
        feeds = {spec.name: random.standard_normal((rows, *spec.shape[1:])) for spec in self.interface.inputs}
        return rows / self.milliseconds(feeds, seconds) * 1e3


def main(
    model: Path,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of one measurement.")] = 4.0,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads of one operator; 0 lets the runtime choose.")] = 1,
    sizes: Annotated[str, typer.Option(help="Batch sizes to try.")] = "1,2,4,8,16,32",
) -> None:
    """Find the best batch size, then measure both in turn."""
    bare = Bare(model, DevicePlacement(use_gpu=False, threads=threads))
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
