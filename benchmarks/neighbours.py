"""Latency of a small model beside busy neighbours in the same server: p50 and p99 in quiet, and how they grow.

    python -m benchmarks.neighbours
    python -m benchmarks.neighbours --peer triton=127.0.0.1:18001:18000

The small model gets requests at random times over gRPC. Its neighbours are a convolutional network with images of 301,056 bytes
that is kept busy, REST uploads of 4 MB, and requests of 2,040 texts. They come from a process of low priority, which stands for
other machines. A peer runs already, with one thread for each of the models "mlp", "cnn" and "image" of
`python -m benchmarks.serving_models FOLDER`; it is not measured beside models that it lacks. All servers are measured in turn
beside each neighbour; figures are medians over the rounds, and ratios to quiet are medians of the ratio within a round.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import onnx
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.attacks.measure import ATTACKER_NICENESS
from benchmarks.attacks.rest_client import connected, repeated
from benchmarks.attacks.texts import FIXED, padded_rows, save_text_models
from benchmarks.harness.server_process import server_process
from benchmarks.serving_models import MODELS
from halfserve.serve.backends.openvino.fitness import processor_name
from halfserve.serve.benchmark.level import Load
from halfserve.serve.benchmark.load_target import LoadTarget, RequestSettings
from halfserve.serve.benchmark.measurement import Measurement, measure
from halfserve.serve.client.errors import ClientError

SMALL, BUSY, IMAGE = "mlp", "cnn", "image"
SETTLE_S = 2.0  # time in which a neighbour starts, before anything is measured
UPLOAD_ROWS, UPLOADERS = 14, 4  # rows of 301,056 bytes in an upload, and connections
IMAGE_BYTES = 3 * 224 * 224 * 2


@dataclass(frozen=True)
class Neighbour:
    """What happens in the server beside the small model.

    Attributes:
        name: name in the table.
        model: the model that it loads.
        run: takes the gRPC address, the REST address and how many seconds to go on, as attacks do.
    """

    name: str
    model: str
    run: Callable[[str, str, float], str]


@dataclass
class Server:
    """A server that is measured, with p50 and p99 of the small model in milliseconds, by neighbour and round."""

    small: LoadTarget
    grpc_address: str
    http_address: str
    figures: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def has(self, model: str) -> bool:
        """Return whether it serves the model."""
        try:
            self.small.client.model_metadata(model)
        except ClientError:
            return False
        return True


def busy(grpc_address: str, http_address: str, seconds: float, *, rows: int, in_flight: int) -> str:
    """Keep requests to the convolutional network in flight; returns its rows per second."""
    del http_address
    with LoadTarget(grpc_address, [BUSY], RequestSettings(batch_size=rows)) as target:
        level = measure(target.bench, Load(concurrency=in_flight), Measurement(seconds=seconds, warmup_s=0))
    return f"{level.requests_per_second * rows:.1f} rows/s"


def uploads(grpc_address: str, http_address: str, seconds: float) -> str:
    """Upload images over REST, several at a time, each on a connection of its own."""
    del grpc_address
    size = UPLOAD_ROWS * IMAGE_BYTES
    shape = {"name": "x", "datatype": "FP16", "shape": [UPLOAD_ROWS, 3, 224, 224], "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [shape], "parameters": {"binary_data_output": True}}).encode()
    lines = (
        f"POST /v2/models/{IMAGE}/infer HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        f"inference-header-content-length: {len(head)}\r\ncontent-length: {len(head) + size}\r\n\r\n"
    )
    request = lines.encode() + head + bytes(size)

    def once(_end: float) -> str:
        with connected(http_address) as connection:
            connection.sendall(request)
            return connection.recv(2**16)[9:12].decode() or "no answer"

    return f"{UPLOADERS} at a time: {repeated([once] * UPLOADERS, seconds)}"


QUIET = "quiet"
NEIGHBOURS = (
    *(
        Neighbour(f"CNN, rows of {rows}, {count} in flight", BUSY, partial(busy, rows=rows, in_flight=count))
        for rows, count in ((1, 1), (1, 16), (8, 1), (8, 16))
    ),
    Neighbour("REST uploads of 4 MB", IMAGE, uploads),
    Neighbour("2,040 texts", FIXED, padded_rows),
)


def main(
    peer: Annotated[
        list[str] | None, typer.Option(metavar="NAME=HOST:PORT:HTTP_PORT", help="Server that runs already.")
    ] = None,
    rate: Annotated[float, typer.Option(min=1, help="Requests a second to the small model.")] = 200.0,
    rounds: Annotated[int, typer.Option(min=1, help="How often each server is measured beside each neighbour.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.5, help="Length of one measurement.")] = 4.0,
    only: Annotated[str, typer.Option(help="Measure beside neighbours whose name contains this text.")] = "",
) -> None:
    """Start a server, measure it and the peers, and print a table."""
    chosen = [neighbour for neighbour in NEIGHBOURS if only in neighbour.name]
    with ExitStack() as stack:
        servers = {"halfserve": _ours(stack), **dict(_peer(text, stack) for text in peer or ())}
        # A process of its own for all neighbours; it has imported everything when the first one starts.
        pool = stack.enter_context(ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), os.nice, (ATTACKER_NICENESS,)))
        for _ in track(range(rounds), description="measuring", console=Console(stderr=True)):
            for neighbour in (None, *chosen):
                for server in servers.values():
                    _measure(server, neighbour, pool, rate, seconds)
    Console(width=120).print(_table(servers, [QUIET, *(neighbour.name for neighbour in chosen)]))


def _ours(stack: ExitStack) -> Server:
    repository = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    for name in (SMALL, BUSY, IMAGE):
        folder = repository / name / "1"
        folder.mkdir(parents=True)
        onnx.save(MODELS[name](), folder / "model.onnx")
        (repository / name / "config.pbtxt").write_text("max_batch_size: 32")
    save_text_models(repository)
    process = stack.enter_context(server_process(repository))
    return _server(process.address, process.http_address, stack)


def _peer(text: str, stack: ExitStack) -> tuple[str, Server]:
    name, _, address = text.partition("=")
    parts = address.split(":")
    if not name or len(parts) != 3:
        raise typer.BadParameter(f"{text!r}: expected NAME=HOST:PORT:HTTP_PORT, such as triton=127.0.0.1:18001:18000")
    host, port, http_port = parts
    return name, _server(f"{host}:{port}", f"{host}:{http_port}", stack)


def _server(grpc_address: str, http_address: str, stack: ExitStack) -> Server:
    return Server(stack.enter_context(LoadTarget(grpc_address, [SMALL], RequestSettings())), grpc_address, http_address)


def _measure(server: Server, neighbour: Neighbour | None, pool: ProcessPoolExecutor, rate: float, seconds: float) -> None:
    """Add p50 and p99 beside a neighbour; None for quiet."""
    name = QUIET if neighbour is None else neighbour.name
    if neighbour is not None and not server.has(neighbour.model):
        return
    lasting = 2 * SETTLE_S + seconds
    running = None if neighbour is None else pool.submit(neighbour.run, server.grpc_address, server.http_address, lasting)
    level = measure(server.small.bench, Load(rate=rate), Measurement(seconds=seconds, warmup_s=SETTLE_S))
    server.figures.setdefault(name, []).append((level.percentile_ms(50), level.percentile_ms(99)))
    server.notes[name] = "" if running is None else running.result()


def _table(servers: dict[str, Server], names: Sequence[str]) -> Table:
    title = f"{SMALL} on {processor_name()}: milliseconds, and ratio to quiet"
    table = Table("beside", "server", "p50", "p99", "p99 ratio", "the neighbour's last answers", title=title)
    for name in names:
        for label, server in servers.items():
            found = server.figures.get(name)
            if found is None:
                continue
            p50, p99 = (statistics.median(column) for column in zip(*found, strict=True))
            ratio = statistics.median(one[1] / quiet[1] for one, quiet in zip(found, server.figures[QUIET], strict=True))
            table.add_row(name, label, f"{p50:.2f}", f"{p99:.2f}", f"{ratio:.2f}", server.notes[name])
    return table


if __name__ == "__main__":
    typer.run(main)
