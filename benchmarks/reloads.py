"""Effect on clients when a model is replaced: windows with a reload, compared with quiet ones of the same run.

    python -m benchmarks.reloads
    python -m benchmarks.reloads --model wide

`halfserve serve` runs in a process of its own, and requests arrive at random at a constant rate; latency counts from the
intended sending time, so a stalled server does not hold them back. Every reload brings a version whose file the server has not
seen: it is tried out in a child process, loaded, run in every batch size and switched to. Quiet windows and windows with one
reload alternate (A B A B). The p99 of each window is compared within each pair; the result is the median over all pairs with
its 95 % confidence interval (of the sign test). Exits with 1 if a request failed.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
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
from benchmarks.reload_windows import PERCENTILES, Windows, compare, measure, median_of
from benchmarks.serving_models import Net, mlp
from halfserve.protos.inference_pb2 import ModelInferRequest, RepositoryModelLoadRequest
from halfserve.serve.benchmark.load.load_generator import LoadGenerator
from halfserve.serve.benchmark.load.spec import LoadSpec

NAME = "net"
SERVICE = "/inference.GRPCInferenceService"
WARM_UP_S = 2.0
LOAD_TIMEOUT_S = 120.0
# The p99 of a window needs ten slower requests above it.
FEWEST_REQUESTS = 1000


def wide() -> onnx.ModelProto:
    """64-2048-2048-2048-10: 17 MB of weights."""
    net = Net()
    net.linear(64, 2048)
    for _ in range(2):
        net.add("Relu", net.end)
        net.linear(2048, 2048)
    net.add("Relu", net.end)
    net.linear(2048, 10)
    return net.model(["batch", 64], ["batch", 10])


def deep() -> onnx.ModelProto:
    """64-64-...-64-10 over 300 layers with shortcuts: a graph that takes long to load, with few weights."""
    net = Net()
    net.linear(64, 64)
    for _ in range(300):
        shortcut = net.end
        net.linear(64, 64)
        net.add("Relu", net.end)
        net.add("Add", net.end, shortcut)
    net.linear(64, 10)
    return net.model(["batch", 64], ["batch", 10])


MODELS = {"mlp": mlp, "wide": wide, "deep": deep}


@dataclass
class Versions:
    """A model folder in which versions are added and removed.

    Attributes:
        repository: repository that contains the folder.
        latest: number of the newest version.
    """

    repository: Path
    latest: int
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


def main(
    reloads: Annotated[int, typer.Option(min=1, help="How often the model is replaced.")] = 100,
    model: Annotated[str, typer.Option(help=f"What is served: {', '.join(MODELS)}.")] = "mlp",
    rate: Annotated[float, typer.Option(min=1, help="Requests a second.")] = 2000.0,
    window_s: Annotated[float, typer.Option("--window", min=0.05, help="Seconds of a window.")] = 1.25,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads of one operator.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Replace a model under load, and compare latencies with those of quiet windows of the same run."""
    if model not in MODELS:
        raise typer.BadParameter(f"--model {model!r} is not known; take one of {', '.join(MODELS)}")
    if rate * window_s < FEWEST_REQUESTS and not as_json:
        typer.echo(f"{rate * window_s:.0f} requests a window are few for a p99; {FEWEST_REQUESTS} would be enough", err=True)
    with tempfile.TemporaryDirectory() as folder:
        repository, cache = Path(folder, "models"), Path(folder, "cache")  # the cache of earlier runs may know the files
        versions = Versions.of(repository, MODELS[model]())
        control = ("--model-control", "explicit", "--load-model", NAME)
        with server_process(repository, *control, threads=threads, cache=cache) as server:
            figures = _measure(server, versions, reloads, LoadSpec(rate=rate, seconds=window_s, connections=4))
    if as_json:
        typer.echo(json.dumps({"model": model, **figures}))
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
