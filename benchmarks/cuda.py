"""Measures serving on a GPU: a ResNet-50, a BERT-base and a MiniLM with random weights, in fp32 and fp16.

    python -m benchmarks.cuda                      # on the first CUDA device; prints tables for docs/explanation/benchmarks.md
    python -m benchmarks.cuda --device cpu --tiny  # the same program on little, anywhere

`make gpu` runs it with the tests and the training benchmarks. Failed measurements are reported on standard error, with exit
code 1 at the end; the others are still made. `--only` selects some of the tables if the time does not suffice for all.

Answers are compared with those of the fp32 model on the CPU; "predicted" is the fp16 model's error in verification's simulation
on the CPU, which rounds after every node. "Alone" is the backend with prepared batches, including copies to the device and
back; "in process" adds the engine's queue and requests of one row; the other ways are `halfserve serve` with one load generator
beside it. Options of the CUDA provider are set one at a time. "predictions" runs ONNX's own test models.
"""

from __future__ import annotations

import os
import platform
import statistics
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

from benchmarks import mixed_lengths
from benchmarks.converters.prediction import Agreement, Errors, errors_of
from benchmarks.converters.suite import judgeable_cases
from benchmarks.cuda_device.networks import FP16, FP32, Network, write_minilm, write_networks
from benchmarks.cuda_device.ways import Alone, each_way, highest, locked, rows_per_second
from halfserve import convert_float_to_float16
from halfserve.export.certificate.budget import ErrorFigures
from halfserve.export.verification.metrics import compare
from halfserve.export.verification.simulation import round_every_node
from halfserve.nvidia_libraries import load_nvidia_libraries
from halfserve.serve.benchmark.level import Load
from halfserve.serve.benchmark.measurement import Goal, Measurement, measure
from halfserve.serve.engine.backend import DevicePlacement
from halfserve.serve.engine.cuda_driver import device_count
from halfserve.serve.engine.errors import BackendError, ModelLoadError
from halfserve.serve.observability.exposition import find_nvml
from tests.export.conversions.cases import KINDS, Case
from tests.export.conversions.crash_pool import Crash, CrashPool
from tests.export.conversions.runtime import Session

# From https://onnxruntime.ai/docs/execution-providers/CUDA-ExecutionProvider.html: options that may pay, against the default.
OPTIONS = (
    ("cudnn_conv_algo_search", "EXHAUSTIVE"),
    ("cudnn_conv_algo_search", "DEFAULT"),
    ("cudnn_conv_use_max_workspace", "0"),
    ("fuse_conv_bias", "1"),
    ("prefer_nhwc", "1"),
    ("use_tf32", "0"),
    ("enable_skip_layer_norm_strict_mode", "1"),
    ("arena_extend_strategy", "kSameAsRequested"),
    ("do_copy_in_default_stream", "0"),
)
REASON_LENGTH = 120
TIMEOUT_S = 120.0  # time limit for one model of the predictions
CUDA = "CUDAExecutionProvider"
BOUNDS_MS = {"resnet": 15.0, "minilm": 15.0, "bert": 130.0}  # latency limits on the p99
WARM_UP_S = 0.5
MIXES = ("50", "short", "tail")  # distributions of lengths
WORST = 5  # models with the largest ratios of found to predicted error
Cells = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Settings of the measurements."""

    placement: DevicePlacement  # device and threads
    seconds: float  # duration of one measurement
    sizes: tuple[int, ...]  # batch sizes
    in_flight: int = 3  # concurrent requests, as a multiple of the batch size

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


def alone_by_size(network: Network, plan: Plan) -> Iterator[Cells]:
    """Batches of every size, with CUDA graphs and without."""
    for precision in (FP32, FP16):
        plain, graphs = (Alone(network.path(precision), plan.placement, graphs=on) for on in (False, True))
        for size in plan.sizes:
            feeds = network.feeds(precision, size)
            without, replayed = (copy.milliseconds(feeds, plan.seconds) for copy in (plain, graphs))
            rates = (f"{size / without * 1e3:.0f}", f"{size / replayed * 1e3:.0f}")
            yield network.name, precision, str(size), f"{without:.3f}", f"{replayed:.3f}", *rates, f"{without / replayed:.2f}"


def options(network: Network, plan: Plan) -> Iterator[Cells]:
    """The largest batch with one option set, measured in turn with the default."""
    for precision in (FP32, FP16):
        feeds = network.feeds(precision, plan.sizes[-1])
        default = Alone(network.path(precision), plan.placement)
        answer = default.run(feeds)["y"]
        for key, text in OPTIONS:
            try:
                changed = Alone(network.path(precision), plan.placement, {key: text})
                error = _distance(answer, changed.run(feeds)["y"]).max_scaled_error
            except (ModelLoadError, BackendError) as failure:
                yield network.name, precision, f"{key}={text}", "-", "-", "-", str(failure)[:REASON_LENGTH]
                continue
            before, with_it = (copy.milliseconds(feeds, plan.seconds) for copy in (default, changed))
            ratio = f"{before / with_it:.3f}"
            yield network.name, precision, f"{key}={text}", f"{before:.3f}", f"{with_it:.3f}", ratio, f"{error:.1e}"


def memory(network: Network, plan: Plan) -> Iterator[Cells]:
    """Time of the same batches in pageable and in locked memory."""
    for precision in (FP32, FP16):
        copy = Alone(network.path(precision), plan.placement)
        for size in plan.sizes:
            feeds = network.feeds(precision, size)
            fixed = locked(feeds) if plan.on_gpu else None
            pageable = copy.milliseconds(feeds, plan.seconds)
            figures = ("-", "-")
            if fixed is not None:
                taken = copy.milliseconds(fixed, plan.seconds)
                figures = (f"{taken:.3f}", f"{pageable / taken:.3f}")
            kib = sum(array.nbytes for array in feeds.values()) / 1024
            yield network.name, precision, str(size), f"{kib:.1f}", f"{pageable:.3f}", *figures


def serving(network: Network, plan: Plan) -> Iterator[Cells]:
    """The rate alone, behind the queue, and by each way over gRPC, at the batch size that is fastest alone."""
    how = Measurement(seconds=plan.seconds, warmup_s=WARM_UP_S)
    for precision in (FP32, FP16):
        best, alone = _fastest(network, precision, plan)
        row, in_flight = network.feeds(precision, 1), max(4, plan.in_flight * best)
        inside = rows_per_second(
            network.path(precision), plan.placement, row, batch_size=best, in_flight=in_flight, seconds=plan.seconds
        )
        yield network.name, precision, str(best), "alone", f"{alone:.0f}", "", "", ""
        yield network.name, precision, str(best), "in process", f"{inside:.0f}", f"{inside / alone:.3f}", "", ""
        for way, bench in each_way(network, precision, plan.placement, best):
            level = measure(bench, Load(concurrency=in_flight), how)
            rate, latencies = level.requests_per_second, (f"{level.percentile_ms(percent):.2f}" for percent in (50, 99))
            yield network.name, precision, str(best), way, f"{rate:.0f}", f"{rate / alone:.3f}", *latencies


def limits(network: Network, plan: Plan) -> Iterator[Cells]:
    """The highest rate of requests whose p99 stays within the limit, for each way."""
    how, goal = Measurement(seconds=plan.seconds, warmup_s=WARM_UP_S), Goal(percent=99, max_ms=BOUNDS_MS[network.name])
    best, alone = _fastest(network, FP16, plan)
    for way, bench in each_way(network, FP16, plan.placement, best):
        level = highest(bench, goal, alone, how)
        figures = ("-", "-", "-")
        if level is not None:
            rate = level.requests_per_second
            figures = (f"{rate:.0f}", f"{rate / alone:.3f}", f"{level.percentile_ms(99):.2f}")
        yield network.name, way, f"{goal.max_ms:g}", *figures


def predictions(kind: str, plan: Plan) -> Iterator[Cells]:
    """Compare the errors on the device with the simulation's predictions, over ONNX's test models of a kind."""
    ratios: dict[str, float] = {}
    failed = []
    provider = CUDA if plan.on_gpu else "CPUExecutionProvider"
    workers = max(2, (os.cpu_count() or 2) // 2)
    cases = judgeable_cases(kind, workers)
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


def lengths(model: Path, plan: Plan) -> Iterator[Cells]:
    """Requests of mixed lengths, with padding and without."""
    device: mixed_lengths.Device = "cuda" if plan.on_gpu else "cpu"
    for found in mixed_lengths.compared(model, MIXES, (16, 64), rounds=3, seconds=plan.seconds, device=device):
        medians = (f"{statistics.median(found.rates[way]):.0f}" for way in mixed_lengths.WAYS)
        yield found.mix, str(found.in_flight), *medians, found.ratio


def _fastest(network: Network, precision: str, plan: Plan) -> tuple[int, float]:
    """The batch size with the most rows a second alone, and that rate."""
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
    "limits": ("model | way | bound of the p99, ms | requests/s | of alone | p99 ms", limits),
    "lengths": ("tokens | in flight | padded 1/s | unpadded 1/s | ratio (least to most)", lengths),
    "alone": ("model | file | batch | ms | ms, CUDA graphs | rows/s | rows/s, CUDA graphs | graphs' gain", alone_by_size),
    "options": ("model | file | option | ms, default | ms | gain | error of the default", options),
    "memory": ("model | file | batch | KiB in | ms, pageable | ms, locked | gain", memory),
}


def main(
    device: Annotated[Literal["cuda", "cpu"], typer.Option(help="Where the models run.")] = "cuda",
    models: Annotated[str, typer.Option(help="Of resnet, minilm and bert.")] = "resnet,minilm,bert",
    only: Annotated[str, typer.Option(help="Some of the tables.")] = ",".join(TABLES),
    sizes: Annotated[str, typer.Option(help="Batch sizes, in rising order.")] = "1,8,32,64",
    seconds: Annotated[float, typer.Option(min=0.01, help="Length of one measurement.")] = 2.0,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads of one operator; 0 lets the runtime choose.")] = 0,
    *,
    tiny: Annotated[bool, typer.Option("--tiny", help="Models in a size for tests.")] = False,
) -> None:
    """Measure, and print each Markdown table as soon as it is complete."""
    for given, there_are in ((only, TABLES), (models, BOUNDS_MS)):
        if unknown := set(given.split(",")) - there_are.keys():
            raise typer.BadParameter(f"there is no {', '.join(sorted(unknown))}; expected some of {','.join(there_are)}")
    on_gpu = device == "cuda"
    if on_gpu and not device_count():
        print("this machine has no CUDA device that could be measured; --device cpu tries the program out", file=sys.stderr)
        raise typer.Exit(2)
    placement = DevicePlacement(use_gpu=on_gpu, require_gpu=on_gpu, threads=threads)
    plan = Plan(placement=placement, seconds=seconds, sizes=tuple(map(int, sizes.split(","))))
    print(f"{_machine(on_gpu=on_gpu)}, ONNX Runtime {ort.__version__}, {datetime.now(UTC):%Y-%m-%d}")
    with tempfile.TemporaryDirectory(prefix="halfserve-cuda-") as name:
        folder = Path(name)
        networks = cache(partial(write_networks, folder, models.split(","), tiny=tiny))
        subjects: dict[str, Callable[[], Iterable[Any]]] = {
            "predictions": lambda: KINDS,
            "lengths": lambda: [write_minilm(folder / "repository", tiny=tiny)],
        }
        failed = [part for part in only.split(",") if not _show(part, subjects.get(part, networks)(), plan)]
    if failed:
        raise typer.Exit(1)


def _show(part: str, subjects: Iterable[Any], plan: Plan) -> bool:
    """Print a table as far as it can be measured; returns whether it is complete. After a failure the other tables go on."""
    headings, rows = TABLES[part]
    if part == "options" and not plan.on_gpu:
        return True  # these options belong to the CUDA provider
    print(f"\n| {headings} |\n|{'---|' * len(headings.split('|'))}")
    is_whole = True
    for subject in subjects:
        try:
            for cells in rows(subject, plan):
                print(f"| {' | '.join(cells)} |", flush=True)
        except (Exception, SystemExit) as error:  # noqa: BLE001  (whatever it is, the other tables are wanted)
            is_whole = False
            print(
                f"{part} of {getattr(subject, 'name', subject)} ended early: {type(error).__name__}: {error}", file=sys.stderr
            )
            traceback.print_exc()
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
