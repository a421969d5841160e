"""Cost of the precision guard: processor time per request of one model under several guards, loaded in turn.

    python -m benchmarks.guard measure --rounds 60
    python -m benchmarks.guard batches

`measure` needs h2load (Debian's package nghttp2-client). One server has the same fp16 network under several names with
different settings. The names are loaded in turn, the unguarded one before each of the others. The result is the server's
processor time, including the shadow model's, in the quietest quarter of the loads: on a machine with other users, only that is
reproducible.

`batches` needs no server: it runs single batches with and without a counting guard, in turn, and prints the difference.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
import onnx
import typer
import uvloop
from onnx import helper, numpy_helper
from rich.console import Console
from rich.progress import track
from rich.table import Table

from halfserve.protos.inference_pb2 import ModelInferRequest
from halfserve.serve.backends.onnx_runtime.onnx_backend import OnnxRuntime
from halfserve.serve.engine.backend import DevicePlacement
from halfserve.serve.engine.config.model_config import Defaults
from halfserve.serve.engine.execution.batch import run_batch
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.repository.loaded_version import load_model
from halfserve.serve.engine.repository.model_repository import find_models
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.server import ServerOptions, serve

OFF = "off"
GUARDS: dict[str, dict[str, str]] = {
    OFF: {"precision_guard": "off"},
    "off_again": {"precision_guard": "off"},  # a copy of "off", to show the noise between equal settings
    "count": {"shadow_rate": "0"},
    "count_and_shadow": {},
    "fallback_and_shadow": {"precision_guard": "fallback"},
    "shadow_1_percent": {"shadow_rate": "0.01"},
    "shadow_all_it_may": {"shadow_rate": "1"},
}
CONNECTIONS = 4
app = typer.Typer(add_completion=False, help=__doc__)


@dataclass(frozen=True)
class Load:
    """Results of one load.

    Attributes:
        cpu_us: processor time of the server per request, in microseconds.
        per_second: requests a second.
    """

    cpu_us: float
    per_second: float


def write_network(path: Path, sizes: list[int], dtype: type[np.float16 | np.float32]) -> None:
    """Write matrix products with ReLUs between them; the last one makes the output."""
    random = np.random.default_rng(0)
    layers = list(pairwise(sizes))
    weights = [(random.standard_normal(shape) / np.sqrt(shape[0])).astype(dtype) for shape in layers]
    nodes, given = [], "x"
    for number in range(len(layers)):
        last = number == len(layers) - 1
        nodes.append(helper.make_node("MatMul", [given, f"w{number}"], ["y" if last else f"h{number}"]))
        if not last:
            nodes.append(helper.make_node("Relu", [f"h{number}"], [f"a{number}"]))
            given = f"a{number}"
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info("x", kind, ["batch", sizes[0]])],
        [helper.make_tensor_value_info("y", kind, ["batch", sizes[-1]])],
        [numpy_helper.from_array(weight, f"w{number}") for number, weight in enumerate(weights)],
    )
    path.parent.mkdir(parents=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), path)


def write_repository(root: Path, sizes: list[int]) -> None:
    """Write the network once per guard, with its fp32 twin."""
    for name, settings in GUARDS.items():
        write_network(root / name / "1" / "model.onnx", sizes, np.float16)
        write_network(root / name / "1" / "fp32" / "model.onnx", sizes, np.float32)
        entries = [f'parameters {{ key: "halfserve.{key}" value {{ string_value: "{v}" }} }}' for key, v in settings.items()]
        (root / name / "config.pbtxt").write_text("\n".join(["max_batch_size: 32", *entries]))


@contextmanager
def serving(root: Path) -> Iterator[tuple[int, str]]:
    """Run a server on the repository; yields its process id and address."""
    command = [sys.executable, "-m", "benchmarks.guard", "serve-one", str(root)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None  # noqa: S101  (for the type checker)
        yield process.pid, f"127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.terminate()
        process.wait()


@app.command(hidden=True)
def serve_one(root: Path) -> None:
    """Serve only gRPC, and print the port."""
    options = ServerOptions(path=root, grpc_port=0, placement=DevicePlacement(use_gpu=False, threads=1), http=None)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(options, OnnxRuntime(), lambda ready: print(ready.grpc_port, flush=True)))


def cpu_ns(pid: int) -> int:
    """Processor time of all threads of a process, in nanoseconds."""
    return sum(int(task.read_text().split()[0]) for task in Path(f"/proc/{pid}/task").glob("*/schedstat"))


def load(pid: int, address: str, body: Path, requests: int, streams: int) -> Load:
    """Load one model of the server."""
    url = f"http://{address}/inference.GRPCInferenceService/ModelInfer"
    headers = ["-H", "content-type: application/grpc", "-H", "te: trailers"]
    command = ["h2load", "-t1", "-n", str(requests), "-c", str(CONNECTIONS), "-m", str(streams), "-d", str(body), *headers, url]
    before = cpu_ns(pid)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    spent = cpu_ns(pid) - before
    rate, good = re.search(r"([\d.]+) req/s", done.stdout), re.search(r"(\d+) succeeded", done.stdout)
    if rate is None or good is None or int(good[1]) != requests:
        raise SystemExit(f"h2load failed:\n{done.stdout[-1000:]}{done.stderr[-500:]}")
    return Load(spent / 1e3 / requests, float(rate[1]))


def write_request(path: Path, model: str, columns: int) -> Path:
    """Write one framed request of one row."""
    request = ModelInferRequest(model_name=model)
    request.inputs.add(name="x", datatype="FP16", shape=[1, columns])
    request.raw_input_contents.append(np.random.default_rng(1).standard_normal(columns).astype(np.float16).tobytes())
    message = request.SerializeToString()
    path.write_bytes(b"\0" + len(message).to_bytes(4, "big") + message)
    return path


@app.command()
def measure(
    sizes: Annotated[str, typer.Option(help="Columns of the input, of each layer, of the output.")] = "64,32,10",
    rounds: Annotated[int, typer.Option(min=2)] = 30,
    requests: Annotated[int, typer.Option(min=100, help="In one load.")] = 3000,
    streams: Annotated[int, typer.Option(min=1, help="Requests in flight on each of the four connections.")] = 8,
    guard: Annotated[list[str] | None, typer.Option(help=f"Only these: {', '.join(GUARDS)}.")] = None,
) -> None:
    """Measure every guard against none and print the quiet quartiles."""
    columns = [int(size) for size in sizes.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_repository(root / "repository", columns)
        bodies = {name: write_request(root / f"{name}.bin", name, columns[0]) for name in GUARDS}
        with serving(root / "repository") as (pid, address):
            loads: dict[str, list[Load]] = {name: [] for name in GUARDS}
            for body in bodies.values():
                load(pid, address, body, 2 * requests, streams)
            turns = [turn for name in guard or GUARDS if name != OFF for turn in (OFF, name)]
            for _ in track(range(rounds), description="measuring", console=Console(stderr=True)):
                for name in turns:
                    loads[name].append(load(pid, address, bodies[name], requests, streams))
    Console().print(_table({name: own for name, own in loads.items() if own}))


@app.command()
def batches(
    sizes: Annotated[str, typer.Option(help="Columns of the input, of each layer, of the output.")] = "64,32,10",
    runs: Annotated[int, typer.Option(min=100, help="Of each size, with and without.")] = 4000,
) -> None:
    """Measure single batches of 1, 8 and 32 requests."""
    columns = [int(size) for size in sizes.split(",")]
    table = Table("requests", "inputs", "us unguarded", "us guarded", "added us per request")
    with tempfile.TemporaryDirectory() as folder:
        write_network(Path(folder) / "network" / "model.onnx", columns, np.float16)
        model = load_one(Path(folder) / "network" / "model.onnx")
    (backend,), guard = model.backends, model.guard
    for count in (1, 8, 32):
        for kind in ("finite", "random bytes"):
            requests = [_request(columns[0], kind) for _ in range(count)]
            without: list[int] = []
            guarded: list[int] = []
            for _ in range(runs):
                for times, own in ((without, None), (guarded, guard)):
                    started = time.thread_time_ns()
                    run_batch(backend, requests, own)
                    times.append(time.thread_time_ns() - started)
            before, after = (statistics.median(times) / 1e3 for times in (without, guarded))
            table.add_row(str(count), kind, f"{before:.1f}", f"{after:.1f}", f"{(after - before) / count:.2f}")
    Console().print(table)


def load_one(path: Path) -> Model:
    """The model in one file, on one CPU thread."""
    (files,) = find_models(path)
    return load_model(files, OnnxRuntime(), DevicePlacement(use_gpu=False, threads=1), Defaults())


def _request(columns: int, kind: str) -> InferRequest:
    random = np.random.default_rng()
    finite, raw = random.standard_normal((1, columns)).astype(np.float16), random.bytes(2 * columns)
    x = finite if kind == "finite" else np.frombuffer(raw, np.float16).reshape(1, columns)
    return InferRequest({"x": x}, ("y",), 1, (columns,), None, lambda _: None)


def _table(loads: dict[str, list[Load]]) -> Table:
    table = Table("guard", "us of processor per request", "processor time", "requests/s", "rate")
    plain_cpu, plain_rate = _quiet(loads[OFF])
    for name, own in loads.items():
        cpu, rate = _quiet(own)
        table.add_row(name, f"{cpu:.2f}", f"{cpu / plain_cpu - 1:+.1%}", f"{rate:.0f}", f"{rate / plain_rate - 1:+.1%}")
    return table


def _quiet(loads: list[Load]) -> tuple[float, float]:
    """The best quartiles of processor time and rate."""
    cpu = statistics.quantiles([x.cpu_us for x in loads], n=4)[0]
    return cpu, statistics.quantiles([x.per_second for x in loads], n=4)[2]


if __name__ == "__main__":
    app()
