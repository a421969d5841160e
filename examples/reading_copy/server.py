"""A server to read: one ONNX model over KServe v2 gRPC, with a batch queue, made of the modules of the real server.

    python -m halfserve.examples.reading_copy.server model.onnx [--port 8001] [--max-batch 32] [--max-delay-ms 2]

Read it from the bottom up, or follow a request from the top down:

    bytes ─ Methods ─> message ─ decode ─> InferRequest ─ Batcher ─> BatchQueue
                                                                        │ a batch
    bytes <─ Methods ─ message <─ encode ─ rows of the outputs <─ run_batch on a thread

| here | in the real server | what that adds |
|---|---|---|
| `Methods` | `serve/transports/` | gRPC over libnghttp2, flow control, memory limits, TLS, tokens |
| `METHODS`, `Service` | `serve/protocol/` | all RPCs, streams, shared memory, requests recognised without being parsed |
| `decode`, `encode` | `serve/protocol/codec.py`, `request_cache.py` | typed contents, priorities, timeouts, classification |
| `Batcher` | `serve/engine/batcher.py` | several copies, short batches on the event loop, admission control, recovery |
| `BatchQueue`, `run_batch` | the same modules | |
| `load` | `serve/model_control/`, `serve/engine/` | a repository, versions, warm-up, trials, the precision guard |
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer
from google.protobuf.message import DecodeError, Message

from halfserve.protos import inference_pb2 as pb
from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.backends.runtimes import Runtimes
from halfserve.serve.engine.backend import Backend, DevicePlacement, ModelInterface
from halfserve.serve.engine.errors import (
    DeadlineExceededError,
    InferenceError,
    InstanceLostError,
    InvalidArgumentError,
    ModelLoadError,
    NotFoundError,
    QueueFullError,
    UnavailableError,
)
from halfserve.serve.engine.execution.batch import run_batch
from halfserve.serve.engine.queueing.batch_queue import Batch, BatchQueue
from halfserve.serve.engine.queueing.pace import BatchLimits
from halfserve.serve.engine.queueing.waiting_requests import FullError
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.results import Answered, Failed
from halfserve.serve.engine.tensors import Tensors, TensorSpec
from halfserve.serve.protocol.raw_tensors import from_raw, to_raw
from halfserve.serve.protocol.status import status_of

SERVICE = "inference.GRPCInferenceService"
VERSION = "1"
RETRY_AFTER_S = 0.05
CODES = {code.value[0]: code for code in grpc.StatusCode}
Context = Any  # grpc.aio.ServicerContext; grpcio ships no types


# --- The model -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ReadModel:
    """One loaded model.

    Attributes:
        name: name that requests ask for.
        interface: its inputs and outputs.
        backend: its only copy; one thread at a time may call it.
    """

    name: str
    interface: ModelInterface
    backend: Backend

    @property
    def inputs(self) -> dict[str, TensorSpec]:
        return {spec.name: spec for spec in self.interface.inputs}

    @property
    def outputs(self) -> dict[str, TensorSpec]:
        return {spec.name: spec for spec in self.interface.outputs}


def load(path: Path) -> ReadModel:
    """Load an ONNX file on the CUDA device, or on the CPU where there is none.

    Raises:
        ModelLoadError: the file is missing or no model, or the runtime refuses it.
    """
    runtime = Runtimes()
    interface = runtime.describe(path)
    if not interface.batched:
        raise ModelLoadError(f"{path}: expected a batch dimension of any size first in every input and output")
    return ReadModel(
        name=path.stem, interface=interface, backend=runtime.load(path, interface, DevicePlacement(), ModelConfig())
    )


# --- Messages and tensors --------------------------------------------------------------------------------------------


def decode(request: pb.ModelInferRequest, model: ReadModel) -> tuple[Tensors, tuple[str, ...], int]:
    """Return the inputs as views of the message's bytes, the names of the wanted outputs, and the number of rows.

    Raises:
        InvalidArgumentError: the request does not fit the model.
    """
    specs, arrays = model.inputs, {}
    if len(request.raw_input_contents) != len(request.inputs):
        raise InvalidArgumentError(
            f"raw_input_contents has {len(request.raw_input_contents)} entries, expected {len(request.inputs)}, one per input"
        )
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        spec = specs.get(tensor.name)
        if spec is None or tensor.name in arrays:
            raise InvalidArgumentError(f"input {tensor.name!r} is unknown or given twice; the model takes {', '.join(specs)}")
        if tensor.datatype != spec.datatype.wire:
            raise InvalidArgumentError(f"input {spec.name!r} has datatype {tensor.datatype!r}, expected {spec.datatype.wire!r}")
        if (mismatch := spec.mismatch(tensor.shape)) is not None:
            raise InvalidArgumentError(f"input {spec.name!r} {mismatch}")
        try:
            arrays[spec.name] = from_raw(raw, spec.datatype, tensor.shape)
        except ValueError as error:
            raise InvalidArgumentError(f"input {spec.name!r} {error}") from None
    if missing := [name for name in specs if name not in arrays]:
        raise InvalidArgumentError(f"missing input {', '.join(missing)}; the model takes {', '.join(specs)}")
    rows = {len(array) for array in arrays.values()}
    if len(rows) != 1 or not min(rows):
        raise InvalidArgumentError(f"the inputs have {sorted(rows)} rows, expected one number of at least 1")
    wanted = tuple(dict.fromkeys(output.name for output in request.outputs)) or tuple(model.outputs)
    if unknown := [name for name in wanted if name not in model.outputs]:
        raise InvalidArgumentError(f"output {unknown[0]!r} is not one of the model's: {', '.join(model.outputs)}")
    return arrays, wanted, rows.pop()


def encode(request: pb.ModelInferRequest, model: ReadModel, outputs: Tensors) -> pb.ModelInferResponse:
    """Return the response to a request, with the outputs' bytes."""
    response = pb.ModelInferResponse(model_name=model.name, model_version=VERSION, id=request.id)
    for name, array in outputs.items():
        datatype = model.outputs[name].datatype
        response.outputs.add(name=name, datatype=datatype.wire, shape=array.shape)
        response.raw_output_contents.append(to_raw(array, datatype))
    return response


# --- Batches ---------------------------------------------------------------------------------------------------------


class Batcher:
    """Queues requests, and computes them in batches on one thread.

    | state | a request arrives | the timer fires | a batch ends |
    |---|---|---|---|
    | idle: nothing waits | queue it, then dispatch | | |
    | holding: requests wait for others | queue it, then dispatch | dispatch | |
    | busy: the thread computes | queue it | | deliver its answers, then dispatch |

    Dispatching takes a batch from the queue if one should leave now (busy), else sets the timer to the time at which one
    will (holding). On the event loop only, but for `run_batch`.
    """

    def __init__(self, backend: Backend, limits: BatchLimits) -> None:
        self._backend = backend
        self._queue = BatchQueue(limits)
        self._thread = ThreadPoolExecutor(1, "model")
        self._is_busy = False
        self._timer: asyncio.TimerHandle | None = None

    async def infer(self, inputs: Tensors, outputs: tuple[str, ...], rows: int, deadline: float | None) -> Tensors:
        """Return the wanted outputs.

        Args:
            inputs: arrays by name, with `rows` rows each.
            outputs: names of the wanted outputs.
            rows: number of rows.
            deadline: time by which the answer must be there, in seconds on time.monotonic()'s clock; None for no deadline.

        Raises:
            InferenceError: the queue is full, the deadline has passed, or the model failed.
        """
        answer: asyncio.Future[Tensors] = asyncio.get_running_loop().create_future()
        # Requests of equal shapes and dtypes can be concatenated: they share a line of the queue, which this key names.
        bucket = tuple((name, array.shape[1:], array.dtype) for name, array in sorted(inputs.items()))
        request = InferRequest(inputs, outputs, rows, bucket, deadline, partial(_settle, answer))
        try:
            self._queue.offer(request)
        except FullError as error:
            raise QueueFullError(
                f"the queue is full: {error}; send the request again later", retry_after_s=RETRY_AFTER_S
            ) from None
        except ValueError as error:
            raise InvalidArgumentError(f"{error}; split the request") from None
        self._dispatch()
        try:
            return await answer
        finally:
            if not answer.done() or answer.cancelled():  # the client has gone
                request.cancelled = True
                self._queue.waiting.remove(request)

    def close(self) -> None:
        self._thread.shutdown()

    def _dispatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while not self._is_busy:
            now = time.monotonic()
            batch = self._queue.take(now)
            if batch is None:
                due = self._queue.next_due(now)
                if due is not None:
                    self._timer = asyncio.get_running_loop().call_later(due - now, self._dispatch)
                return
            for request in batch.late:
                request.finish(DeadlineExceededError("the deadline passed before the request could be computed"))
            if batch.requests:
                self._is_busy = True
                self._compute(batch)

    def _compute(self, batch: Batch) -> None:
        started, loop = time.monotonic(), asyncio.get_running_loop()
        running = loop.run_in_executor(self._thread, run_batch, self._backend, batch.requests)
        running.add_done_callback(partial(self._deliver, batch, started))

    def _deliver(self, batch: Batch, started: float, running: asyncio.Future[list[Answered | Failed]]) -> None:
        self._is_busy = False
        self._queue.observe(batch.bucket, batch.rows, time.monotonic() - started)
        try:
            results = running.result()
        except InstanceLostError as error:
            results = [Failed(request, UnavailableError(f"the model's device is lost: {error}")) for request in batch.requests]
        for result in results:
            if isinstance(result, Failed):
                result.request.finish(result.error)
            else:
                for request, answer in zip(result.requests, result.answers, strict=True):
                    request.finish(answer)
        self._dispatch()


def _settle(answer: asyncio.Future[Tensors], result: Tensors | InferenceError) -> None:
    if answer.done():  # cancelled a moment ago
        return
    if isinstance(result, InferenceError):
        answer.set_exception(result)
    else:
        answer.set_result(result)


# --- The protocol ----------------------------------------------------------------------------------------------------


class Service:
    """The RPCs, as functions from a message and a deadline to a message."""

    def __init__(self, model: ReadModel, batcher: Batcher) -> None:
        self._model, self._batcher = model, batcher

    async def live(self, _request: Message, _deadline: float | None) -> Message:
        return pb.ServerLiveResponse(live=True)

    async def ready(self, _request: Message, _deadline: float | None) -> Message:
        return pb.ServerReadyResponse(ready=True)

    async def model_ready(self, request: pb.ModelReadyRequest, _deadline: float | None) -> Message:
        self._check(request.name, request.version)
        return pb.ModelReadyResponse(ready=True)

    async def model_metadata(self, request: pb.ModelMetadataRequest, _deadline: float | None) -> Message:
        self._check(request.name, request.version)
        interface = self._model.interface
        inputs, outputs = (
            [pb.ModelMetadataResponse.TensorMetadata(name=s.name, datatype=s.datatype.wire, shape=s.shape) for s in specs]
            for specs in (interface.inputs, interface.outputs)
        )
        return pb.ModelMetadataResponse(
            name=self._model.name, versions=[VERSION], platform=interface.kind.platform, inputs=inputs, outputs=outputs
        )

    async def infer(self, request: pb.ModelInferRequest, deadline: float | None) -> Message:
        self._check(request.model_name, request.model_version)
        inputs, outputs, rows = decode(request, self._model)
        return encode(request, self._model, await self._batcher.infer(inputs, outputs, rows, deadline))

    def _check(self, name: str, version: str) -> None:
        if name != self._model.name or version not in {"", VERSION}:
            raise NotFoundError(f"model {name!r} {version} is not served; {self._model.name!r} {VERSION} is")


Method = Callable[[Service, Any, float | None], Awaitable[Message]]
METHODS: dict[str, tuple[type[Message], Method]] = {
    f"/{SERVICE}/ServerLive": (pb.ServerLiveRequest, Service.live),
    f"/{SERVICE}/ServerReady": (pb.ServerReadyRequest, Service.ready),
    f"/{SERVICE}/ModelReady": (pb.ModelReadyRequest, Service.model_ready),
    f"/{SERVICE}/ModelMetadata": (pb.ModelMetadataRequest, Service.model_metadata),
    f"/{SERVICE}/ModelInfer": (pb.ModelInferRequest, Service.infer),
}


# --- The transport ---------------------------------------------------------------------------------------------------


class Methods(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpcio ships no types
    """Finds the handler of a call by its path."""

    def __init__(self, service: Service) -> None:
        self._handlers = {
            path: grpc.unary_unary_rpc_method_handler(partial(_answer, service, kind, method))
            for path, (kind, method) in METHODS.items()
        }

    def service(self, handler_call_details: Any) -> Any:
        return self._handlers.get(handler_call_details.method)  # grpcio answers UNIMPLEMENTED to None


async def _answer(service: Service, kind: type[Message], method: Method, data: bytes, context: Context) -> bytes:
    """Parse a message, call the method, and serialize its answer; every error becomes a status."""
    left_s = context.time_remaining()
    try:
        try:
            request = kind.FromString(data)
        except DecodeError:
            raise InvalidArgumentError(f"the message is not a {kind.__name__}") from None
        answer = await method(service, request, None if left_s is None else time.monotonic() + left_s)
        return bytes(answer.SerializeToString())
    except InferenceError as error:
        status = status_of(error)
        return bytes(await context.abort(CODES[status.code], status.details, status.trailers))


async def serve(model: ReadModel, limits: BatchLimits, port: int, stop: asyncio.Event, on_ready: Callable[[int], None]) -> None:
    """Serve until `stop` is set, then answer what was accepted, and return.

    `on_ready` gets the port that the server listens on. Raises OSError: the port is in use.
    """
    batcher = Batcher(model.backend, limits)
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", -1)])
    server.add_generic_rpc_handlers((Methods(Service(model, batcher)),))
    try:
        port = server.add_insecure_port(f"127.0.0.1:{port}")
    except RuntimeError:
        raise OSError(f"cannot listen on port {port}; choose another one (0 finds a free one)") from None
    await server.start()
    on_ready(port)
    await stop.wait()
    await server.stop(grace=30)
    batcher.close()


def main(
    path: Annotated[Path, typer.Argument(help="ONNX file whose inputs and outputs begin with a batch dimension.")],
    port: Annotated[int, typer.Option(help="TCP port to listen on; 0 finds a free one.")] = 8001,
    max_batch: Annotated[int, typer.Option(min=1, help="Most rows in a batch.")] = 32,
    max_delay_ms: Annotated[float, typer.Option(min=0, help="Milliseconds that a request waits for others.")] = 2.0,
) -> None:
    """Serve one ONNX model over gRPC."""

    async def run() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        limits = BatchLimits(max_rows=max_batch, max_delay_s=max_delay_ms / 1000)
        await serve(model, limits, port, stop, lambda at: typer.echo(f"serving {model.name!r} on 127.0.0.1:{at}"))

    try:
        model = load(path)
        asyncio.run(run())
    except (ModelLoadError, OSError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    typer.run(main)
