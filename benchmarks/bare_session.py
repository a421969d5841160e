"""Share of a bare ONNX Runtime session that servers answer: rows per second of the session, our server and peers, in turn.

    python -m benchmarks.bare_session resnet50.onnx
    python -m benchmarks.bare_session resnet50.onnx --peer triton=127.0.0.1:18001/resnet50

With N requests of one row in flight, the session runs prepared batches of the size, up to N, at which it computes the most rows
per second; a batch's time is the median. It computes on the CPU with the settings of our server, which this program starts.
Peers run already, on the same model, with as many threads and batches of up to the largest size. The inputs are those of
MODEL.npz beside the model (`python -m benchmarks.half_serving write` makes both), else random. All are measured in turn,
A B A B ..., beside one load generator; shares are medians of the share within a round.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.cuda_device.ways import Alone
from benchmarks.harness.loaded_server import running_server
from benchmarks.harness.server_process import served
from halfserve.protos.datatypes import BY_WIRE
from halfserve.protos.inference_pb2 import ModelInferRequest
from halfserve.serve.backends.openvino.fitness import processor_name
from halfserve.serve.benchmark.level import Load, parse_concurrencies
from halfserve.serve.benchmark.load_target import RequestSettings
from halfserve.serve.benchmark.measurement import Measurement, measure
from halfserve.serve.engine.backend import DevicePlacement
from halfserve.serve.protocol.raw_tensors import from_raw


class Bare(Alone):
    """A session that only this process uses, with the row that every request brings."""

    def __init__(self, model: Path, threads: int, request: ModelInferRequest) -> None:
        super().__init__(model, DevicePlacement(use_gpu=False, threads=threads))
        tensors = zip(request.inputs, request.raw_input_contents, strict=True)
        self._row = {tensor.name: from_raw(raw, BY_WIRE[tensor.datatype], tensor.shape) for tensor, raw in tensors}

    def rows_per_second(self, rows: int, seconds: float) -> float:
        """Run batches of this size one after the other."""
        feeds = {name: np.repeat(array, rows, axis=0) for name, array in self._row.items()}
        return rows / self.milliseconds(feeds, seconds) * 1e3


def main(
    model: Annotated[Path, typer.Argument(help="An ONNX model whose only other variable sizes MODEL.npz gives.")],
    peer: Annotated[list[str] | None, typer.Option(metavar="NAME=HOST:PORT/MODEL", help="A server that runs already.")] = None,
    concurrency: Annotated[str, typer.Option(help="Requests in flight, one level after the other.")] = "1,4,16",
    rounds: Annotated[int, typer.Option(min=1, help="How often each is measured at each level.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of one measurement.")] = 4.0,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads of one operator; 0 lets the runtime choose.")] = 1,
    sizes: Annotated[str, typer.Option(help="Batch sizes to try.")] = "1,2,4,8,16,32",
) -> None:
    """Find the session's best batch size for each level, then measure all in turn."""
    batches = parse_concurrencies(sizes, "--sizes")
    settings = RequestSettings(given=_samples(model))
    how = Measurement(seconds=seconds, warmup_s=0.5)
    table = Table("in flight", "", "rows/s", "share", title=f"{model.stem} on {processor_name()}, {threads or 'all'} threads")
    with ExitStack() as stack:
        ours = stack.enter_context(served(model, max(batches), threads, settings))
        servers = {"halfserve": ours, **dict(running_server(text, settings, stack) for text in peer or ())}
        bare = Bare(model, threads, ours.plain_requests[0])
        rates = {size: bare.rows_per_second(size, seconds / 4) for size in batches}
        for number in parse_concurrencies(concurrency):
            best = max((size for size in batches if size <= number), key=lambda size: rates[size], default=min(batches))
            alone: list[float] = []
            answered: dict[str, list[float]] = {name: [] for name in servers}
            for _ in range(rounds):
                alone.append(bare.rows_per_second(best, seconds))
                for name, target in servers.items():
                    answered[name].append(measure(target.bench, Load(concurrency=number), how).requests_per_second)
            table.add_row(str(number), f"bare session, batches of {best}", f"{statistics.median(alone):.1f}", "1")
            for name, per_second in answered.items():
                share = statistics.median(served / one for served, one in zip(per_second, alone, strict=True))
                table.add_row("", name, f"{statistics.median(per_second):.1f}", f"{share:.3f}")
    Console(width=100).print(table)


def _samples(model: Path) -> Mapping[str, np.ndarray[Any, Any]]:
    """Return the arrays of MODEL.npz; none if there is no such file."""
    file = model.with_suffix(".npz")
    if not file.exists():
        return {}
    with np.load(file) as archive:
        return dict(archive)


if __name__ == "__main__":
    typer.run(main)
