"""Timely answers of a server under overload: the peak rate first, then open loops below and above it.

    python -m benchmarks.overload

Every request has a deadline, and counts as good if its answer arrives before it: the load generator gives up at the deadline
like a client. Requests arrive at random (Poisson), and their latency counts from the intended sending time. The model is
compute-bound and leaves one of two cores to the load generator. The peak is the best of several closed loops with the same
deadline.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
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
Errors = dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Load:
    """Results of one load.

    Attributes:
        offered: requests a second that were sent.
        good: requests a second that were answered before their deadline.
        of_peak: good requests a second, relative to the peak.
        p50_ms: median latency of good requests from the intended sending time, in milliseconds.
        p99_ms: 99th percentile of that latency, in milliseconds.
        errors: other requests by status.
        resident_mb: memory of the server afterwards, in MB.
    """

    offered: float
    good: float
    of_peak: float
    p50_ms: float
    p99_ms: float
    errors: Errors
    resident_mb: float


def save_model(repository: Path, target_ms: float | None) -> None:
    """Write the model, with its latency target if there is one."""
    model = repository / "resnet"
    (model / "1").mkdir(parents=True)
    onnx.save(resnet(), model / "1" / "model.onnx")
    (model / "config.pbtxt").write_text(f"max_batch_size: 16 {TARGET % target_ms if target_ms else ''}", encoding="utf-8")


def request() -> bytes:
    """One row, serialized."""
    message = ModelInferRequest(model_name="resnet")
    message.inputs.add(name="x", datatype="FP16", shape=[1, 3, 32, 32])
    message.raw_input_contents.append(np.ones((1, 3, 32, 32), np.float16).tobytes())
    return message.SerializeToString()


def good_per_second(tally: LoadStatistics, deadline_s: float) -> float:
    """Answers a second that came before the deadline."""
    return tally.latency.within(deadline_s * 1e3) / tally.seconds


def measure(generator: LoadGenerator, order: LoadSpec, pid: int, peak: float) -> Load:
    """Measure one open loop."""
    tally = generator.run(order).tally
    good = good_per_second(tally, order.timeout_s)
    p50_ms, p99_ms = tally.latency.percentiles_ms([50.0, 99.0])
    return Load(
        offered=tally.sent / tally.seconds,
        good=good,
        of_peak=good / peak,
        p50_ms=p50_ms,
        p99_ms=p99_ms,
        errors=dict(tally.errors),
        resident_mb=look(pid).resident_mb,
    )


def table(peak: float, loads: list[tuple[float, Load]], deadline_ms: float) -> Table:
    """A table with one load per line."""
    shown = Table(
        *("load", "offered/s", "good/s", "of the peak", "p50 ms", "p99 ms", "the others", "server MB"),
        title=f"peak {peak:.0f} requests/s, deadline {deadline_ms:g} ms",
    )
    for factor, load in loads:
        errors = ", ".join(f"{count} {name}" for name, count in load.errors.items()) or "-"
        figures = (f"{load.offered:.0f}", f"{load.good:.0f}", f"{load.of_peak:.2f}", f"{load.p50_ms:.1f}", f"{load.p99_ms:.1f}")
        shown.add_row(f"{factor:g}x", *figures, errors, f"{load.resident_mb:.0f}")
    return shown


def main(
    deadline_ms: Annotated[float, typer.Option(min=1, help="Of every request.")] = 250.0,
    target_ms: Annotated[float | None, typer.Option(help="The model's halfserve.latency_target_ms; none by default.")] = None,
    loads: Annotated[str, typer.Option(help="Loads, as multiples of the peak.")] = "0.5,0.9,1.2,2,4",
    seconds: Annotated[float, typer.Option(min=0.5, help="Of each load.")] = 8.0,
    rounds: Annotated[int, typer.Option(min=1, help="Times that all loads are measured, each time with its own peak.")] = 1,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads of one operator.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Start a server, find its peak, load it below and above, and print the results."""
    factors = [float(text) for text in loads.split(",")]
    results = []
    with tempfile.TemporaryDirectory() as name:
        save_model(Path(name), target_ms)
        with (
            server_process(Path(name), threads=threads) as server,
            LoadGenerator(server.endpoint(INFER_PATH), [request()]) as generator,
        ):
            deadline_s = deadline_ms / 1e3
            generator.run(LoadSpec(concurrency=16, seconds=1.0))  # warm-up
            for _ in range(rounds):
                closed = [LoadSpec(concurrency=c, seconds=seconds / 2, timeout_s=deadline_s) for c in CONCURRENCIES]
                peak = max(good_per_second(generator.run(order).tally, deadline_s) for order in closed)
                measured = []
                for factor in factors:
                    order = LoadSpec(rate=peak * factor, seconds=seconds, timeout_s=deadline_s, connections=4)
                    measured.append((factor, measure(generator, order, server.process.pid, peak)))
                results.append((peak, measured))
    if as_json:
        print(json.dumps([{"peak": peak, "loads": {f: asdict(load) for f, load in run}} for peak, run in results]))
        return
    for peak, run in results:
        Console().print(table(peak, run, deadline_ms))


if __name__ == "__main__":
    typer.run(main)
