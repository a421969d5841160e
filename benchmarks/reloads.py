"""What clients notice of a model that is replaced while they use it: quiet spells and spells with a reload, in turn.

    python -m benchmarks.reloads

A server in a process of its own, clients that ask one after the other, and a reload by request in every other spell: the model
is loaded, tried out in every batch size and switched to. Both kinds of spell are of the same run, so that what else the machine
does falls on both.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import tempfile
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated

import grpc
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.footprint import resident_kb
from benchmarks.serving_models import mlp
from protos.inference_pb2 import ModelInferRequest, RepositoryModelLoadRequest

SERVICE = "/inference.GRPCInferenceService"
NAME = "mlp"
KINDS = ("quiet", "reload")


@dataclass
class Observed:
    """What the clients saw.

    Attributes:
        latencies: (when asked, seconds until the answer), on time.perf_counter()'s clock.
        failures: texts of errors.
    """

    latencies: list[tuple[float, float]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def main(
    reloads: Annotated[int, typer.Option(min=1, help="How often the model is replaced.")] = 100,
    clients: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 4,
    spell_s: Annotated[float, typer.Option("--spell", min=0.05, help="Seconds from one spell to the next.")] = 0.3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Replace a model under load and compare latencies with those of quiet spells."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        _save(Path(folder))
        ours, theirs = spawn.Pipe()
        server = spawn.Process(target=_serve, args=(folder, theirs))
        server.start()
        try:
            figures = _measure(f"127.0.0.1:{ours.recv()}", server.pid or 0, reloads, clients, spell_s)
        finally:
            server.terminate()
            server.join()
    if as_json:
        typer.echo(json.dumps(figures))
    else:
        _print(figures)


def _save(repository: Path) -> None:
    (repository / NAME / "1").mkdir(parents=True)
    (repository / NAME / "1" / "model.onnx").write_bytes(mlp().SerializeToString())


def _serve(path: str, ready: Connection) -> None:
    from serve.backends.onnxruntime_backend import OnnxRuntime  # noqa: PLC0415  (in the server's process alone)
    from serve.control.options import ALL, ControlMode, ControlOptions  # noqa: PLC0415  (see above)
    from serve.engine.backend import Placement  # noqa: PLC0415  (see above)
    from serve.server import ServerOptions, serve  # noqa: PLC0415  (see above)

    options = ServerOptions(
        path=Path(path),
        grpc_port=0,
        placement=Placement(use_gpu=False, threads=1),
        control=ControlOptions(mode=ControlMode.EXPLICIT, load_at_start=(ALL,)),
    )
    asyncio.run(serve(options, OnnxRuntime(), lambda told: ready.send(told.grpc_port)))


def _measure(address: str, pid: int, reloads: int, clients: int, spell_s: float) -> dict[str, object]:
    observed, stop = Observed(), threading.Event()
    threads = [threading.Thread(target=_ask, args=(address, observed, stop)) for _ in range(clients)]
    spells: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    loading_s = []
    for thread in threads:
        thread.start()
    try:
        with grpc.insecure_channel(address) as channel:
            load = channel.unary_unary(f"{SERVICE}/RepositoryModelLoad")
            time.sleep(4 * spell_s)
            before_kb = resident_kb(pid)
            for number in range(reloads):
                for kind in KINDS:
                    started = time.perf_counter()
                    if kind == "reload":
                        load(_load_request(number), timeout=60)
                        loading_s.append(time.perf_counter() - started)
                    time.sleep(max(0.0, started + spell_s - time.perf_counter()))
                    spells[kind].append((started, time.perf_counter()))
            grown_kb = resident_kb(pid) - before_kb
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    return {
        "reloads": reloads,
        "requests": len(observed.latencies),
        "failures": observed.failures,
        "seconds_to_load": round(float(np.median(loading_s)), 4),
        "grown_kb": grown_kb,
        **{kind: _percentiles(observed, spells[kind]) for kind in KINDS},
    }


def _ask(address: str, observed: Observed, stop: threading.Event) -> None:
    request = ModelInferRequest(model_name=NAME, raw_input_contents=[np.ones(64, np.float16).tobytes()])
    request.inputs.add(name="x", datatype="FP16", shape=[1, 64])
    data = request.SerializeToString()
    with grpc.insecure_channel(address) as channel:
        infer = channel.unary_unary(f"{SERVICE}/ModelInfer")
        while not stop.is_set():
            started = time.perf_counter()
            try:
                infer(data, timeout=60)
            except grpc.RpcError as error:
                observed.failures.append(f"{error.code().name}: {error.details()}")
            observed.latencies.append((started, time.perf_counter() - started))


def _load_request(number: int) -> bytes:
    request = RepositoryModelLoadRequest(model_name=NAME)
    request.parameters["config"].string_param = json.dumps({"max_batch_size": 8 + number % 2})  # what changes is loaded anew
    return request.SerializeToString()


def _percentiles(observed: Observed, spells: list[tuple[float, float]]) -> dict[str, float]:
    """Of the latencies of requests that were sent in these spells, in milliseconds."""
    starts = np.array([start for start, _ in spells])
    ends = np.array([end for _, end in spells])
    asked = np.array([when for when, _ in observed.latencies])
    spell = np.searchsorted(starts, asked, side="right") - 1
    inside = (spell >= 0) & (asked < ends[spell])
    milliseconds = np.array([seconds for _, seconds in observed.latencies])[inside] * 1e3
    return {f"p{q:g}": round(float(np.percentile(milliseconds, q)), 3) for q in (50, 90, 99, 99.9)}


def _print(figures: dict[str, object]) -> None:
    table = Table("milliseconds", "p50", "p90", "p99", "p99.9")
    for kind in KINDS:
        row = figures[kind]
        if isinstance(row, dict):
            table.add_row(kind, *(f"{value:.2f}" for value in row.values()))
    console = Console()
    console.print(table)
    failures = figures["failures"]
    failed = len(failures) if isinstance(failures, list) else 0
    console.print(
        f"{figures['reloads']} reloads of {figures['seconds_to_load']} s, {figures['requests']} requests, {failed} failed, "
        f"resident memory {figures['grown_kb']:+} kB"
    )


if __name__ == "__main__":
    typer.run(main)
