"""Timely answers of a server under overload: the peak rate first, then open loops below and above it.

    python -m benchmarks.overload

Every request has a deadline, and counts as good if its answer arrives before it: the load generator gives up at the deadline
like a client. Requests arrive at random (Poisson), and their latency counts from the intended sending time. The model is
compute-bound and leaves one of two cores to the load generator. The peak is the best of several closed loops with the same
deadline.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import numpy as np
import onnx
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.harness.process_watch import look
from benchmarks.harness.server_process import server_process
from benchmarks.serving_models import resnet
from halfserve.protos.inference_pb2 import ModelInferRequest
from halfserve.serve.benchmark.load.load_generator import LoadGenerator
from halfserve.serve.benchmark.load.spec import LoadSpec, LoadStatistics
from halfserve.serve.protocol.service import INFER_PATH

CONCURRENCIES = (8, 16, 32)
TARGET = 'parameters { key: "halfserve.latency_target_ms" value { string_value: "%g" } }'
HEADINGS = ("load", "offered/s", "good/s", "of the peak", "p50 ms", "p99 ms", "the others", "server MB")


def save_model(repository: Path, target_ms: float | None) -> None:
    """Write the model, with its latency target if there is one."""
    model = repository / "resnet"
    (model / "1").mkdir(parents=True)
    onnx.save(resnet(), model / "1" / "model.onnx")
    (model / "config.pbtxt").write_text(f"max_batch_size: 16 {TARGET % target_ms if target_ms else ''}", encoding="utf-8")


def request() -> bytes:
    """Return one row, serialized."""
    message = ModelInferRequest(model_name="resnet")
    message.inputs.add(name="x", datatype="FP16", shape=[1, 3, 32, 32])
    message.raw_input_contents.append(np.ones((1, 3, 32, 32), np.float16).tobytes())
    return message.SerializeToString()


def good_per_second(tally: LoadStatistics, deadline_s: float) -> float:
    """Answers a second that came before the deadline."""
    return tally.latency.within(deadline_s * 1e3) / tally.seconds


def cells(factor: float, tally: LoadStatistics, deadline_s: float, peak: float, pid: int) -> list[str]:
    """Return one load's row of the table; latencies are those of good requests, from the intended sending time."""
    good = good_per_second(tally, deadline_s)
    latencies = (f"{latency:.1f}" for latency in tally.latency.percentiles_ms([50.0, 99.0]))
    others = ", ".join(f"{count} {name}" for name, count in tally.errors.items()) or "-"
    rates = (f"{tally.sent / tally.seconds:.0f}", f"{good:.0f}", f"{good / peak:.2f}")
    return [f"{factor:g}x", *rates, *latencies, others, f"{look(pid).resident_mb:.0f}"]


def main(
    deadline_ms: Annotated[float, typer.Option(min=1, help="Of every request.")] = 250.0,
    target_ms: Annotated[float | None, typer.Option(help="The model's halfserve.latency_target_ms; none by default.")] = None,
    loads: Annotated[str, typer.Option(help="Loads, as multiples of the peak.")] = "0.5,0.9,1.2,2,4",
    seconds: Annotated[float, typer.Option(min=0.5, help="Of each load.")] = 8.0,
    rounds: Annotated[int, typer.Option(min=1, help="Times that all loads are measured, each time with its own peak.")] = 1,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads of one operator.")] = 1,
) -> None:
    """Start a server, find its peak, load it below and above, and print a table for each round."""
    deadline_s = deadline_ms / 1e3
    with tempfile.TemporaryDirectory() as name:
        save_model(Path(name), target_ms)
        with (
            server_process(Path(name), threads=threads) as server,
            LoadGenerator(server.endpoint(INFER_PATH), [request()]) as generator,
        ):
            generator.run(LoadSpec(concurrency=16, seconds=1.0))  # warm-up
            for _ in range(rounds):
                closed = [LoadSpec(concurrency=c, seconds=seconds / 2, timeout_s=deadline_s) for c in CONCURRENCIES]
                peak = max(good_per_second(generator.run(order).tally, deadline_s) for order in closed)
                table = Table(*HEADINGS, title=f"peak {peak:.0f} requests/s, deadline {deadline_ms:g} ms")
                for factor in map(float, loads.split(",")):
                    order = LoadSpec(rate=peak * factor, seconds=seconds, timeout_s=deadline_s, connections=4)
                    table.add_row(*cells(factor, generator.run(order).tally, deadline_s, peak, server.process.pid))
                Console().print(table)


if __name__ == "__main__":
    typer.run(main)
