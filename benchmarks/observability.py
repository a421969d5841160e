"""What it costs to be observed: processor time per request of two servers, one observed and one not, loaded in turn.

    python -m benchmarks.observability measure model.onnx

Needs h2load (Debian's package nghttp2-client). One server is loaded at a time, A B A B ..., in rounds of about a second, of
which the best count. Processor time of the server, all its threads, is what is told: on a machine that others use too it says
more than the clock. The metrics of an observed server are scraped once in each round. Processes of one program differ by some
percent from start to start, so all are started anew several times; told are the medians of their differences, with the least
and the greatest, and a second server that is not observed shows how much of that is chance.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
import uvloop
from rich.console import Console
from rich.table import Table

from protos.inference_pb2 import ModelInferRequest
from serve.backends.onnxruntime_backend import OnnxRuntime
from serve.client import InferenceClient
from serve.engine.backend import Placement
from serve.http.options import HttpOptions
from serve.observability.options import AccessLog, ObserveOptions
from serve.server import Ready, ServerOptions, serve

Variant = Callable[[Path], ObserveOptions]
PLAIN = "not observed"
AGAIN = f"{PLAIN}, again"
VARIANTS: dict[str, Variant] = {
    PLAIN: lambda _: ObserveOptions(),
    AGAIN: lambda _: ObserveOptions(),
    "metrics": lambda _: ObserveOptions(),
    "metrics, log 1 in 100": lambda folder: _observe(folder, AccessLog.SAMPLED),
    "metrics, traces 1 in 1000": lambda folder: _observe(folder, AccessLog.OFF, traces=1000),
    "all three": lambda folder: _observe(folder, AccessLog.SAMPLED, traces=1000),
    "metrics, log of every request": lambda folder: _observe(folder, AccessLog.ALL),
    "metrics, traces 1 in 50": lambda folder: _observe(folder, AccessLog.OFF, traces=50),
}
app = typer.Typer(add_completion=False, help=__doc__)


def _observe(folder: Path, log: AccessLog, traces: int = 0) -> ObserveOptions:
    return ObserveOptions(
        access_log=log,
        access_log_file=folder / "access.log",
        trace_to=str(folder / "traces.json") if traces else "",
        trace_rate=traces or 1,
    )


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        pid: of its process.
        grpc: host:port.
        metrics: URL.
        scraped: its metrics are asked for while it is loaded.
    """

    pid: int
    grpc: str
    metrics: str
    scraped: bool


@dataclass(frozen=True)
class Load:
    """One load.

    Attributes:
        cpu_us: of the server, per request.
        per_second: requests.
    """

    cpu_us: float
    per_second: float


def cpu_ns(pid: int) -> int:
    """Processor time of all threads of a process."""
    return sum(int(task.read_text().split()[0]) for task in Path(f"/proc/{pid}/task").glob("*/schedstat"))


@contextmanager
def started(model: Path, variant: str) -> Iterator[Server]:
    """A server in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.observability", "serve-one", str(model), variant]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None  # noqa: S101  (for the type checker)
        line = process.stdout.readline()
        if not line:
            raise SystemExit("the server did not start; its message is above")
        ports = json.loads(line)
        metrics = f"http://127.0.0.1:{ports['metrics']}/metrics"
        yield Server(process.pid, f"127.0.0.1:{ports['grpc']}", metrics, scraped=variant not in {PLAIN, AGAIN})
    finally:
        process.terminate()
        process.wait()


@contextmanager
def scraping(server: Server) -> Iterator[None]:
    """Ask for the metrics once a second, first of all now; Prometheus would every few."""
    over = threading.Event()

    def scrape() -> None:
        while True:
            with urllib.request.urlopen(server.metrics) as answer:  # noqa: S310  (our own server)
                answer.read()
            if over.wait(1.0):
                return

    thread = threading.Thread(target=scrape)
    if server.scraped:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if server.scraped:
            thread.join()


def request_file(server: Server, model: str, folder: Path) -> Path:
    """One framed request of one row of ones; variable dimensions are 1."""
    with InferenceClient(server.grpc) as client:
        metadata = client.model_metadata(model)
    request = ModelInferRequest(model_name=model)
    for tensor in metadata.inputs:
        shape = [max(1, size) for size in tensor.shape]
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=shape)
        width = {"FP16": np.float16, "FP32": np.float32, "INT64": np.int64}[tensor.datatype]
        request.raw_input_contents.append(np.ones(shape, width).tobytes())
    message = request.SerializeToString()
    path = folder / "request.bin"
    path.write_bytes(b"\0" + len(message).to_bytes(4, "big") + message)
    return path


def load(server: Server, body: Path, requests: int, streams: int) -> Load:
    """Load a server from four connections."""
    path = f"http://{server.grpc}/inference.GRPCInferenceService/ModelInfer"
    headers = ["-H", "content-type: application/grpc", "-H", "te: trailers"]
    before = cpu_ns(server.pid)
    with scraping(server):
        command = ["h2load", "-t1", "-n", str(requests), "-c", "4", "-m", str(streams), "-d", str(body), *headers, path]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    spent = cpu_ns(server.pid) - before
    rate, good = re.search(r"([\d.]+) req/s", done.stdout), re.search(r"(\d+) succeeded", done.stdout)
    if rate is None or good is None or int(good[1]) != requests:
        raise SystemExit(f"h2load failed:\n{done.stdout[-1000:]}{done.stderr[-500:]}")
    return Load(spent / 1e3 / requests, float(rate[1]))


@app.command()
def measure(
    model: Annotated[
        Path,
        typer.Argument(exists=True, dir_okay=False, help="An .onnx file; a small one, so that the server is what is measured."),
    ],
    starts: Annotated[int, typer.Option(min=1, help="How often all servers are started anew.")] = 5,
    rounds: Annotated[int, typer.Option(min=1, help="Loads of each server after each start.")] = 5,
    requests: Annotated[int, typer.Option(min=100, help="In one load.")] = 50_000,
    streams: Annotated[int, typer.Option(min=1, help="Requests in flight on each of the four connections.")] = 8,
    only: Annotated[str, typer.Option(help="Ways whose names hold this text, and not being observed.")] = "",
) -> None:
    """Measure each way of being observed against not being observed."""
    if shutil.which("h2load") is None:
        raise SystemExit("h2load is not installed; install Debian's package nghttp2-client")
    chosen = [variant for variant in VARIANTS if only in variant or variant in {PLAIN, AGAIN}]
    best = [_best_of_each(model, chosen, rounds, requests, streams) for _ in range(starts)]
    Console().print(_table(best))


def _best_of_each(model: Path, chosen: Sequence[str], rounds: int, requests: int, streams: int) -> dict[str, Load]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = {variant: stack.enter_context(started(model.resolve(), variant)) for variant in chosen}
        body = request_file(servers[PLAIN], model.stem, folder)
        for server in servers.values():
            load(server, body, max(1, requests // 4), streams)
        loads: dict[str, list[Load]] = {variant: [] for variant in chosen}
        for _ in range(rounds):
            for variant, server in servers.items():
                loads[variant].append(load(server, body, requests, streams))
    return {variant: _best(own) for variant, own in loads.items()}


def _table(best: Sequence[Mapping[str, Load]]) -> Table:
    table = Table("server", "us of processor per request", "requests/s", "processor time", "rate")
    for variant in best[0]:
        more = [100 * (loads[variant].cpu_us / loads[PLAIN].cpu_us - 1) for loads in best]
        faster = [100 * (loads[variant].per_second / loads[PLAIN].per_second - 1) for loads in best]
        cpu_us = statistics.median(loads[variant].cpu_us for loads in best)
        rate = statistics.median(loads[variant].per_second for loads in best)
        table.add_row(variant, f"{cpu_us:.2f}", f"{rate:.0f}", _spread(more), _spread(faster))
    return table


def _spread(percent: Sequence[float]) -> str:
    return f"{statistics.median(percent):+.1f} % ({min(percent):+.1f} to {max(percent):+.1f})"


def _best(loads: Sequence[Load]) -> Load:
    """The mean of the best fifth: what disturbs a round makes it dearer, never cheaper."""
    count = max(1, len(loads) // 5)
    times = sorted(load.cpu_us for load in loads)[:count]
    rates = sorted((load.per_second for load in loads), reverse=True)[:count]
    return Load(sum(times) / count, sum(rates) / count)


@app.command(hidden=True)
def serve_one(model: Path, variant: str) -> None:
    """Serve, and print the ports as JSON."""

    def tell(ready: Ready) -> None:
        print(json.dumps({"grpc": ready.grpc_port, "metrics": ready.metrics_port}), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        options = ServerOptions(
            path=model,
            grpc_port=0,
            placement=Placement(use_gpu=False, threads=1),
            http=HttpOptions(port=0, metrics_port=0),
            observe=VARIANTS[variant](Path(folder)),
        )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(options, OnnxRuntime(), tell))


if __name__ == "__main__":
    app()
