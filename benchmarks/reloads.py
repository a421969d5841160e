"""Effect on clients when a model is replaced: windows with a reload, compared with quiet ones of the same run.

    python -m benchmarks.reloads

`halfserve serve` runs in a process of its own, and requests arrive at random at a constant rate; latency counts from the
intended sending time, so a stalled server does not hold them back. Every reload brings a version whose file the server has not
seen: it is tried out in a child process, loaded, run in every batch size and switched to. Quiet windows and windows with one
reload alternate (A B A B). The p99 of each window is compared within each pair; the result is the median over all pairs with
its 95 % confidence interval (of the sign test). Exits with 1 if a request failed.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import grpc
import numpy as np
import onnx
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.harness.process_watch import look
from benchmarks.harness.server_process import ServerProcess, server_process
from benchmarks.serving_models import mlp
from halfserve.protos.inference_pb2 import ModelInferRequest, RepositoryModelLoadRequest
from halfserve.serve.benchmark.load.load_generator import LoadGenerator
from halfserve.serve.benchmark.load.spec import LatencyHistogram, LoadSpec, LoadStatistics

NAME = "net"
SERVICE = "/inference.GRPCInferenceService"
WARM_UP_S = 2.0
LOAD_TIMEOUT_S = 120.0
# The p99 of a window needs ten slower requests above it.
FEWEST_REQUESTS = 1000
CONFIDENCE = 0.95
PERCENTILES = (50.0, 90.0, 99.0, 99.9)
BEGIN = 0.1  # fraction of a window that passes before the reload


@dataclass
class Versions:
    """A model folder in which versions are added and removed."""

    repository: Path  # repository that contains the folder
    latest: int  # number of the newest version
    _content: bytes

    @classmethod
    def of(cls, repository: Path, model: onnx.ModelProto) -> Versions:
        """Write a repository with the first version."""
        versions = cls(repository, 0, model.SerializeToString())
        versions.add()
        return versions

    def add(self) -> None:
        """Add a new version, whose file no server has seen, and remove all versions but the one before."""
        self.latest += 1
        name = onnx.ModelProto()
        name.metadata_props.add(key="version", value=str(self.latest))
        hidden = self.repository / NAME / f".{self.latest}"
        hidden.mkdir(parents=True)
        # Protobuf merges concatenated messages into one.
        (hidden / "model.onnx").write_bytes(self._content + name.SerializeToString())
        hidden.rename(hidden.with_name(str(self.latest)))
        if self.latest > 2:
            shutil.rmtree(self.repository / NAME / str(self.latest - 2))


@dataclass(frozen=True, kw_only=True)
class Median:
    """The median of some values, and the bounds of the true median with 95 % confidence."""

    value: float
    low: float
    high: float


def median_of(values: Sequence[float]) -> Median:
    """Return the median, with the interval between two of the values that follows from the sign test.

    Each value is above the true median with probability 1/2, so the number of values above it is binomial (W. J. Conover,
    Practical Nonparametric Statistics, section 3.2). Fewer than six values give no 95 % interval; it then spans all values.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("the median of no values was asked for, expected one at least")
    ordered = sorted(values)
    count, middle = len(ordered), len(ordered) // 2
    value = ordered[middle] if count % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    rank, below = 0, 0.5**count  # the probability that at most `rank` values are below the true median
    while 2 * below <= 1 - CONFIDENCE:
        rank += 1
        below += math.comb(count, rank) * 0.5**count
    outside = max(0, rank - 1)
    return Median(value=value, low=ordered[outside], high=ordered[count - 1 - outside])


@dataclass
class Windows:
    """Windows of one kind."""

    tallies: list[LoadStatistics] = field(default_factory=list)  # results of each window, in order
    loading_s: list[float] = field(default_factory=list)  # duration of each reload in seconds; empty for quiet windows

    @property
    def failed(self) -> int:
        """Requests that failed."""
        return sum(tally.failed for tally in self.tallies)

    @property
    def requests(self) -> int:
        """Requests that were answered."""
        return sum(tally.latency.total for tally in self.tallies)

    def of_each(self, percentile: float) -> list[float]:
        """Return a percentile of each window's latencies, in milliseconds."""
        return [tally.latency.percentiles_ms([percentile])[0] for tally in self.tallies]

    def together(self) -> list[float]:
        """PERCENTILES of the latencies of all windows together, in milliseconds."""
        return LatencyHistogram.merged(tally.latency for tally in self.tallies).percentiles_ms(PERCENTILES)


def compare(quiet: Windows, reload: Windows, percentile: float) -> Median:
    """Increase of a percentile in windows with a reload over the neighbouring quiet ones, in percent."""
    pairs = zip(quiet.of_each(percentile), reload.of_each(percentile), strict=True)
    return median_of([100 * (with_reload / without - 1) for without, with_reload in pairs])


def measure(
    generator: LoadGenerator, order: LoadSpec, pairs: int, *, add: Callable[[], None], load: Callable[[], None]
) -> tuple[Windows, Windows]:
    """Measure windows without and with a reload in turn, so that slow changes affect both.

    Args:
        generator: load generator.
        order: load of each window.
        pairs: number of pairs of windows.
        add: provides the next version, outside of the windows.
        load: has the model replaced; returns once it is.
    """
    quiet, reload = Windows(), Windows()
    for _ in range(pairs):
        add()
        quiet.tallies.append(generator.run(order).tally)
        _with_reload(generator, order, load, reload)
    return quiet, reload


def _with_reload(generator: LoadGenerator, order: LoadSpec, load: Callable[[], None], windows: Windows) -> None:
    trouble: list[BaseException] = []

    def work() -> None:
        time.sleep(BEGIN * (order.seconds or 0.0))
        started = time.perf_counter()
        try:
            load()
        except BaseException as error:  # noqa: BLE001  (raised below, where somebody sees it)
            trouble.append(error)
        windows.loading_s.append(time.perf_counter() - started)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        windows.tallies.append(generator.run(order).tally)
    finally:
        thread.join()
    if trouble:
        raise trouble[0]


def main(
    reloads: Annotated[int, typer.Option(min=1, help="How often the model is replaced.")] = 100,
    rate: Annotated[float, typer.Option(min=1, help="Requests a second.")] = 2000.0,
    window_s: Annotated[float, typer.Option("--window", min=0.05, help="Seconds of a window.")] = 1.25,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads of one operator.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Replace a model under load, and compare latencies with those of quiet windows of the same run."""
    if rate * window_s < FEWEST_REQUESTS and not as_json:
        typer.echo(f"{rate * window_s:.0f} requests a window are few for a p99; {FEWEST_REQUESTS} would be enough", err=True)
    with tempfile.TemporaryDirectory() as folder:
        repository, cache = Path(folder, "models"), Path(folder, "cache")  # the cache of earlier runs may know the files
        versions = Versions.of(repository, mlp())
        control = ("--model-control", "explicit", "--load-model", NAME)
        with server_process(repository, *control, threads=threads, cache=cache) as server:
            figures = _measure(server, versions, reloads, LoadSpec(rate=rate, seconds=window_s, connections=4))
    if as_json:
        typer.echo(json.dumps(figures))
    else:
        _print(figures)
    if figures["failed"]:
        raise SystemExit(1)


def _measure(server: ServerProcess, versions: Versions, reloads: int, order: LoadSpec) -> dict[str, Any]:
    target = server.endpoint(f"{SERVICE}/ModelInfer")
    with LoadGenerator(target, [_request()]) as generator, grpc.insecure_channel(target.address) as channel:
        ask = channel.unary_unary(f"{SERVICE}/RepositoryModelLoad")
        message = RepositoryModelLoadRequest(model_name=NAME).SerializeToString()

        def load() -> None:
            ask(message, timeout=LOAD_TIMEOUT_S)

        generator.run(LoadSpec(rate=order.rate, seconds=WARM_UP_S, connections=order.connections))
        before_mb = look(server.process.pid).resident_mb
        quiet, reload = measure(generator, order, reloads, add=versions.add, load=load)
        grown_mb = look(server.process.pid).resident_mb - before_mb
    loading = median_of(reload.loading_s)
    return {
        "reloads": reloads,
        "requests": quiet.requests + reload.requests,
        "failed": quiet.failed + reload.failed,
        "errors": _errors(quiet, reload),
        "requests_a_window": round((quiet.requests + reload.requests) / (2 * reloads)),
        "seconds_to_load": round(loading.value, 4),
        "grown_mb": round(grown_mb, 2),
        "quiet_ms": _figures(quiet),
        "reload_ms": _figures(reload),
        "difference_percent": {
            f"p{q:g}": {name: round(figure, 1) for name, figure in vars(compare(quiet, reload, q)).items()}
            for q in PERCENTILES[:3]
        },
    }


def _request() -> bytes:
    request = ModelInferRequest(model_name=NAME, raw_input_contents=[np.ones(64, np.float16).tobytes()])
    request.inputs.add(name="x", datatype="FP16", shape=[1, 64])
    return request.SerializeToString()


def _errors(*kinds: Windows) -> dict[str, int]:
    errors: dict[str, int] = {}
    for tally in (tally for kind in kinds for tally in kind.tallies):
        for status, count in tally.errors.items():
            errors[status] = errors.get(status, 0) + count
    return errors


def _figures(windows: Windows) -> dict[str, Any]:
    p99 = median_of(windows.of_each(99.0))
    pooled = zip(PERCENTILES, windows.together(), strict=True)
    return {
        "p99_of_a_window": {name: round(figure, 3) for name, figure in vars(p99).items()},
        "all_windows_together": {f"p{q:g}": round(figure, 3) for q, figure in pooled},
    }


def _print(figures: dict[str, Any]) -> None:
    table = Table("milliseconds", "p99 of a window (95 % interval)", *(f"p{q:g}" for q in PERCENTILES))
    for kind in ("quiet", "reload"):
        row = figures[f"{kind}_ms"]
        p99, together = row["p99_of_a_window"], row["all_windows_together"].values()
        median = f"{p99['value']:.2f} ({p99['low']:.2f} to {p99['high']:.2f})"
        table.add_row(kind, median, *(f"{value:.2f}" for value in together))
    console = Console(soft_wrap=True)
    console.print(table)
    console.print(
        f"Windows of {figures['requests_a_window']} requests, in turn; the difference within a pair, median of "
        f"{figures['reloads']} pairs with its 95 % interval:"
    )
    for name, change in figures["difference_percent"].items():
        console.print(f"{name} with a reload: {change['value']:+.1f} % ({change['low']:+.1f} to {change['high']:+.1f})")
    console.print(
        f"{figures['reloads']} reloads of {figures['seconds_to_load']} s, {figures['requests']} requests, "
        f"{figures['failed']} failed, resident memory {figures['grown_mb']:+} MB"
    )


if __name__ == "__main__":
    typer.run(main)
