"""Share of a device's speed that serving keeps for large rows: a backend that sleeps stands for the device.

python -m benchmarks.staged_batches --row-bytes 602112

The bare loop runs the backend on prepared batches. The engine alone gets its requests from this process, without a transport.
Then clients send them over gRPC, from processes of their own; the event loop's processor time for a row bounds that rate.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import typer

from halfserve.protos.datatypes import BY_WIRE
from halfserve.protos.inference_pb2 import ModelInferRequest
from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.benchmark.load.load_generator import LoadGenerator
from halfserve.serve.benchmark.load.spec import LoadEndpoint, LoadSpec
from halfserve.serve.engine.backend import ModelInterface
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.queueing.pace import BatchLimits
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.tensors import RawInput, RawInputs, RawLayout, Tensors, TensorSpec
from halfserve.serve.process import infrequent_collection, short_switch_interval
from halfserve.serve.protocol.service import INFER_PATH, Service
from halfserve.serve.transports.nghttp2.server import Nghttp2Server

FLOAT = np.dtype(np.float32)


@dataclass
class Sleeping:
    """A backend that sleeps without Python's lock, and returns one number of each row."""

    seconds: float  # time of a batch
    provider: str = "sleep"
    precision: str = "fp32"
    rows: list[int] = field(default_factory=list)  # number of rows of each batch
    gaps_s: list[float] = field(default_factory=list)  # time between two batches
    _ended: float = 0.0

    def compute_dtype(self, name: str) -> np.dtype[Any]:
        del name
        return FLOAT

    def run(self, inputs: Tensors) -> Tensors:
        began = time.perf_counter()
        if self._ended:
            self.gaps_s.append(began - self._ended)
        self.rows.append(len(inputs["x"]))
        time.sleep(self.seconds)
        outputs = {"y": inputs["x"][:, :1].copy()}
        self._ended = time.perf_counter()
        return outputs

    def give_up(self) -> None:
        """Do nothing, as a batch is short."""

    def forget(self) -> None:
        """Forget the batches so far."""
        self.rows, self.gaps_s, self._ended = [], [], 0.0

    def said(self) -> str:
        """Return the batches in words."""
        gap_ms = 1e3 * statistics.median(self.gaps_s or [0.0])
        return f"{statistics.mean(self.rows):.1f} rows a batch, {gap_ms:.2f} ms between two (median)"


def model_of(backend: Sleeping, rows: int, width: int) -> Model:
    """Return a model x FP32 [rows, width] -> y FP32 [rows, 1]."""
    x, y = (TensorSpec(name=name, datatype=BY_WIRE["FP32"], shape=(-1, size)) for name, size in (("x", width), ("y", 1)))
    interface = ModelInterface(inputs=(x,), outputs=(y,), batched=True)
    config, limits = ModelConfig(name="sleep", max_batch_size=rows), BatchLimits(max_rows=rows)
    model = Model(name="sleep", version=1, interface=interface, config=config, backends=[backend], limits=limits)
    return model.start()


def bare_rate(backend: Sleeping, rows: int, width: int, seconds: float) -> float:
    """Rows a second of a loop over prepared batches."""
    inputs = {"x": np.zeros((rows, width), FLOAT)}
    began, count = time.perf_counter(), 0
    while time.perf_counter() < began + seconds:
        backend.run(inputs)
        count += rows
    return count / (time.perf_counter() - began)


async def engine_rate(model: Model, width: int, in_flight: int, seconds: float) -> float:
    """Rows a second of the engine: each answer is followed by the next request."""
    layout = RawLayout((RawInput("x", FLOAT, (1, width), width, width * FLOAT.itemsize),))
    datas = [np.full(width, number, FLOAT).tobytes() for number in range(in_flight)]
    began = time.perf_counter()
    answered, waiting, drained = 0, in_flight, asyncio.Event()

    def submit(number: int) -> None:
        def done(_: object) -> None:
            nonlocal answered, waiting
            answered += 1
            if time.perf_counter() < began + seconds:
                submit(number)
                return
            waiting -= 1
            if not waiting:
                drained.set()

        inputs = RawInputs(layout, datas[number], (0,))
        model.batcher.submit(InferRequest(inputs, ("y",), 1, (width,), None, done, size=len(datas[number])))

    for number in range(in_flight):
        submit(number)
    await drained.wait()
    return answered / (time.perf_counter() - began)


async def grpc_rate(model: Model, width: int, spec: LoadSpec, processes: int) -> tuple[float, float]:
    """Rows a second over gRPC, and the event loop's microseconds of processor time for a row."""
    server = Nghttp2Server(Service(InferenceCore([model]), server_version="0"), "127.0.0.1", 0)
    port = await server.start()
    request = ModelInferRequest(model_name="sleep")
    request.inputs.add(name="x", datatype="FP32", shape=[1, width])
    request.raw_input_contents.append(bytes(width * FLOAT.itemsize))
    endpoint = LoadEndpoint(host="127.0.0.1", port=port, path=INFER_PATH)
    generator = await asyncio.to_thread(LoadGenerator, endpoint, [request.SerializeToString()], processes=processes)
    with generator:
        spent_s = time.thread_time()
        result = await asyncio.to_thread(generator.run, spec)
        spent_s = time.thread_time() - spent_s
    await server.stop(grace_s=1.0)
    answered = result.tally.sent - result.tally.failed
    return answered / result.tally.seconds, spent_s / answered * 1e6


def main(
    *,
    row_bytes: Annotated[int, typer.Option(min=4, help="Bytes of a row, a multiple of 4.")] = 602_112,
    rows: Annotated[int, typer.Option(min=1, help="Rows of a full batch.")] = 32,
    compute_ms: Annotated[float, typer.Option(min=0.1, help="Time of a batch.")] = 4.0,
    in_flight: Annotated[int, typer.Option(min=1, help="Requests of one row at a time.")] = 128,
    seconds: Annotated[float, typer.Option(min=0.2, help="Length of one measurement.")] = 4.0,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    processes: Annotated[int, typer.Option(min=0, help="Processes of the gRPC clients; 0 measures the engine alone.")] = 1,
) -> None:
    """Print the rows a second of each way, and their share of the backend's."""
    import uvloop  # noqa: PLC0415  (has no wheel for Windows)

    backend, width = Sleeping(compute_ms / 1e3), row_bytes // FLOAT.itemsize
    most = rows / backend.seconds
    with (
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        infrequent_collection(),
        short_switch_interval(),
    ):
        for _ in range(rounds):
            bare = bare_rate(backend, rows, width, seconds / 4)
            print(f"bare loop    {bare:6.0f} rows/s, {bare / most:.3f} of {rows} rows in {compute_ms:g} ms")
            backend.forget()
            model = model_of(backend, rows, width)
            rate = runner.run(engine_rate(model, width, in_flight, seconds))
            runner.run(model.batcher.drain())
            print(f"engine alone {rate:6.0f} rows/s, {rate / most:.3f}; {rate / bare:.3f} of the bare loop; {backend.said()}")
            if processes:
                backend.forget()
                spec = LoadSpec(concurrency=in_flight, seconds=seconds, connections=4)
                rate, loop_us = runner.run(grpc_rate(model_of(backend, rows, width), width, spec, processes))
                said = f"{backend.said()}; the event loop takes {loop_us:.0f} us a row: {1e6 / loop_us:.0f} rows/s at most"
                print(f"over gRPC    {rate:6.0f} rows/s, {rate / most:.3f}; {said}")


if __name__ == "__main__":
    typer.run(main)
