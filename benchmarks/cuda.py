"""Measures serving on a GPU: a ResNet-50, a BERT-base and a MiniLM with random weights, in fp32 and fp16.

    python -m benchmarks.cuda                      # on the first CUDA device; prints tables for docs/explanation/benchmarks.md
    python -m benchmarks.cuda --device cpu --tiny  # the same program on little, anywhere

`make gpu` runs it with the tests and the training benchmarks. Failed measurements are reported on standard error, with exit
code 1 at the end; the others are still made. `--only` selects some of the tables if the time does not suffice for all.

Answers are compared with those of the fp32 model on the CPU; "predicted" is the fp16 model's error in verification's simulation
on the CPU, which rounds after every node. "Alone" is a session with prepared batches in locked memory, including copies to the
device and back; the other ways are `halfserve serve` with one load generator beside it, whose requests have one row.
"predictions" runs ONNX's own test models.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import onnx
import onnxruntime as ort
import typer

from benchmarks.converters.prediction import Agreement, Errors, errors_of
from benchmarks.converters.suite import judgeable_cases
from benchmarks.cuda_device.networks import FP16, FP32, Network, networks_of
from benchmarks.cuda_device.ways import Alone, each_way
from halfserve import convert_float_to_float16
from halfserve.export.certificate.budget import ErrorFigures
from halfserve.export.verification.metrics import compare
from halfserve.export.verification.simulation import round_every_node
from halfserve.nvidia_libraries import load_nvidia_libraries
from halfserve.serve.benchmark.level import Load
from halfserve.serve.benchmark.measurement import Measurement, measure
from halfserve.serve.engine.backend import DevicePlacement
from halfserve.serve.engine.cuda_driver import device_count
from halfserve.serve.engine.errors import BackendError
from halfserve.serve.observability.exposition import find_nvml
from tests.export.conversions.cases import KINDS, Case
from tests.export.conversions.crash_pool import Crash, CrashPool
from tests.export.conversions.runtime import Session

REASON_LENGTH = 120
TIMEOUT_S = 120.0  # time limit for one model of the predictions
CUDA = "CUDAExecutionProvider"
MODELS = ("resnet", "minilm", "bert")
WARM_UP_S = 0.5
WORST = 5  # models with the largest ratios of found to predicted error
Cells = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Settings of the measurements."""

    placement: DevicePlacement  # device and threads
    seconds: float  # duration of one measurement
    sizes: tuple[int, ...]  # batch sizes
    in_flight: int = 3  # concurrent requests, as a multiple of the batch size
    files: tuple[str, ...] = (FP32, FP16)  # precisions of the files that are served
    cases: int | None = None  # largest number of ONNX's models of a kind; None for all

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a CUDA device."""
        return self.placement.use_gpu


def accuracy(network: Network, plan: Plan) -> Iterator[Cells]:
    """Errors of the fp32 and the fp16 model on the device, and the predicted error of the latter."""
    feeds = {precision: network.feeds(precision, 16) for precision in (FP32, FP16)}
    feeds[FP16] = {name: array.astype(feeds[FP16][name].dtype) for name, array in feeds[FP32].items()}
    on_cpu = DevicePlacement(use_gpu=False, threads=plan.placement.threads)
    reference = Alone(network.path(FP32), on_cpu).run(feeds[FP32])["y"]
    rounded = round_every_node(onnx.load(network.path(FP16)), cuda=plan.on_gpu)
    simulated = Session(rounded.SerializeToString(), "ORT_DISABLE_ALL")
    predicted = _distance(reference, np.asarray(simulated.run(dict(feeds[FP16]))[0]))
    for precision in (FP32, FP16):
        alone = Alone(network.path(precision), plan.placement)
        found = _distance(reference, alone.run(feeds[precision])["y"])
        forecast = f"{predicted.max_scaled_error:.1e}" if precision == FP16 else ""
        yield (
            *(network.name, precision, alone.backend.precision, f"{found.max_scaled_error:.1e}", forecast),
            *(f"{found.agreement:.3f}" if found.agreement is not None else "", str(found.non_finite), alone.nodes),
        )


def serving(network: Network, plan: Plan) -> Iterator[Cells]:
    """Yield the rate alone, and by each way over gRPC, at the batch size that is fastest alone."""
    how = Measurement(seconds=plan.seconds, warmup_s=WARM_UP_S)
    for precision in plan.files:
        best, alone = _fastest(network, precision, plan)
        in_flight = max(4, plan.in_flight * best)
        yield network.name, precision, str(best), "alone", f"{alone:.0f}", "", "", ""
        for way, bench in each_way(network, precision, plan.placement, best):
            level = measure(bench, Load(concurrency=in_flight), how)
            rate, latencies = level.requests_per_second, (f"{level.percentile_ms(percent):.2f}" for percent in (50, 99))
            yield network.name, precision, str(best), way, f"{rate:.0f}", f"{rate / alone:.3f}", *latencies


def predictions(kind: str, plan: Plan) -> Iterator[Cells]:
    """Compare the errors on the device with the simulation's predictions, over ONNX's test models of a kind."""
    ratios: dict[str, float] = {}
    failed = []
    provider = CUDA if plan.on_gpu else "CPUExecutionProvider"
    workers = max(2, (os.cpu_count() or 2) // 2)
    cases = judgeable_cases(kind, workers, most=plan.cases)
    with CrashPool(compared, workers=workers, timeout_seconds=TIMEOUT_S) as pool:
        for case, errors in zip(cases, pool.map((case, provider) for case in cases), strict=True):
            if isinstance(errors, Crash):
                failed.append(f"{case.name}: {errors.text}"[:REASON_LENGTH])
            else:
                ratios[case.name] = errors.ratio
    if not ratios:
        raise BackendError(f"none of {len(failed)} models ran; the first: {failed[0]}")
    agreement = Agreement.of(ratios)
    worst = ", ".join(f"{name} {ratio:.2g}" for name, ratio in agreement.worst[:WORST])
    yield kind, *agreement.cells, worst, str(len(failed)), "; ".join(failed)


def compared(case: Case, provider: str) -> Errors:
    """Convert a model, and compare its answers with those before the conversion."""
    converted = convert_float_to_float16(onnx.load_from_string(case.model), keep_io_types=True)
    if provider == CUDA:
        load_nvidia_libraries()
    return errors_of(case, converted, Session(converted.SerializeToString(), provider=provider), cuda=provider == CUDA)


def _fastest(network: Network, precision: str, plan: Plan) -> tuple[int, float]:
    """Return the batch size with the most rows a second alone, and that rate."""
    copy = Alone(network.path(precision), plan.placement)
    rates = {size: size / copy.milliseconds(network.feeds(precision, size), plan.seconds) * 1e3 for size in plan.sizes}
    best = max(rates, key=lambda size: rates[size])
    return best, rates[best]


TABLES: dict[str, tuple[str, Callable[[Any, Plan], Iterator[Cells]]]] = {
    "predictions": (
        "ONNX's models | number | within the prediction | within twice | median ratio | 95 % | largest | worst | failed | how",
        predictions,
    ),
    "accuracy": (
        "model | file | computes in | error of fp32 on the CPU | predicted | same class | not finite | nodes",
        accuracy,
    ),
    "served": ("model | file | batch | way | rows/s | of alone | p50 ms | p99 ms", serving),
}

# Columns of a table that its verdict repeats.
SUMMARIES = {"served": (0, 1, 3, 4, 5), "predictions": (0, 2, 5)}


def main(
    device: Annotated[Literal["cuda", "cpu"], typer.Option(help="Where the models run.")] = "cuda",
    models: Annotated[str, typer.Option(help="Of resnet, minilm and bert.")] = "resnet,minilm,bert",
    only: Annotated[str, typer.Option(help="Some of the tables.")] = ",".join(TABLES),
    sizes: Annotated[str, typer.Option(help="Batch sizes, in rising order.")] = "1,8,32,64",
    seconds: Annotated[float, typer.Option(min=0.01, help="Length of one measurement.")] = 2.0,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads of one operator; 0 lets the runtime choose.")] = 0,
    *,
    networks: Annotated[Path | None, typer.Option(help="Folder with the networks of a bundle; else they are exported.")] = None,
    files: Annotated[str, typer.Option(help="Precisions of the files that are served.")] = f"{FP32},{FP16}",
    cases: Annotated[int | None, typer.Option(min=1, help="Most of ONNX's models of a kind in the predictions.")] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Models in a size for tests.")] = False,
) -> None:
    """Measure, and print each Markdown table as soon as it is complete."""
    for given, there_are in ((only, tuple(TABLES)), (models, MODELS)):
        if unknown := set(given.split(",")) - set(there_are):
            raise typer.BadParameter(f"there is no {', '.join(sorted(unknown))}; expected some of {','.join(there_are)}")
    on_gpu = device == "cuda"
    if on_gpu and not device_count():
        print("this machine has no CUDA device that could be measured; --device cpu tries the program out", file=sys.stderr)
        raise typer.Exit(2)
    placement = DevicePlacement(use_gpu=on_gpu, require_gpu=on_gpu, threads=threads)
    batches, precisions = tuple(map(int, sizes.split(","))), tuple(files.split(","))
    plan = Plan(placement=placement, seconds=seconds, sizes=batches, files=precisions, cases=cases)
    print(f"{_machine(on_gpu=on_gpu)}, ONNX Runtime {ort.__version__}, {datetime.now(UTC):%Y-%m-%d}")
    with tempfile.TemporaryDirectory(prefix="halfserve-cuda-") as name:
        folder = Path(name)
        written = cache(partial(_networks, networks, folder, models.split(","), tiny=tiny))
        subjects: dict[str, Callable[[], Iterable[Any]]] = {
            "predictions": lambda: KINDS,
        }
        failed = [part for part in only.split(",") if not _show(part, subjects.get(part, written)(), plan)]
    if failed:
        raise typer.Exit(1)


def _networks(skeletons: Path | None, folder: Path, names: list[str], *, tiny: bool) -> list[Network]:
    if skeletons is not None:
        return networks_of(skeletons, folder, names, tiny=tiny)
    from benchmarks.cuda_device.exported_networks import write_networks  # noqa: PLC0415  (a bundle's networks need no torch)

    return write_networks(folder, names, tiny=tiny)


def _show(part: str, subjects: Iterable[Any], plan: Plan) -> bool:
    """Print a table as far as it can be measured; returns whether it is complete. After a failure the other tables go on."""
    headings, rows = TABLES[part]
    print(f"\n| {headings} |\n|{'---|' * len(headings.split('|'))}")
    is_whole, summary = True, []
    for subject in subjects:
        try:
            for cells in rows(subject, plan):
                print(f"| {' | '.join(cells)} |", flush=True)
                summary.append(" ".join(cells[column] for column in SUMMARIES.get(part, ())))
        except (Exception, SystemExit) as error:  # noqa: BLE001  (whatever it is, the other tables are wanted)
            is_whole = False
            print(
                f"{part} of {getattr(subject, 'name', subject)} ended early: {type(error).__name__}: {error}", file=sys.stderr
            )
            traceback.print_exc()
    if part in SUMMARIES:
        print(f"\nverdict: {', '.join(summary) or 'nothing was measured'}{'' if is_whole else '; ended early'}", flush=True)
    return is_whole


def _distance(reference: np.ndarray, found: np.ndarray) -> ErrorFigures:
    return compare(reference.astype(np.float32), found.astype(np.float32))


def _machine(*, on_gpu: bool) -> str:
    nvml = find_nvml() if on_gpu else None
    if nvml is None:
        return "a CUDA device" if on_gpu else platform.processor() or platform.machine()
    name, driver = nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetHandleByIndex(0)), nvml.nvmlSystemGetDriverVersion()
    return f"{name}, driver {driver}"


if __name__ == "__main__":
    typer.run(main)
