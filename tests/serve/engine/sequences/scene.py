"""A small recurrent model, its configuration, and requests to the real scheduler before the real batcher."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import numpy as np
from onnx import NodeProto, TensorProto, helper

from halfserve.serve.backends.onnx_runtime.onnx_backend import OnnxRuntime
from halfserve.serve.engine.backend import Backend, DevicePlacement
from halfserve.serve.engine.config.model_config import Defaults
from halfserve.serve.engine.errors import InferenceError
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.repository.model_loading import load_version, started
from halfserve.serve.engine.repository.model_repository import find_models
from halfserve.serve.engine.requests import InferRequest, Parameter
from halfserve.serve.engine.sequences.sequence_scheduler import SequenceScheduler
from halfserve.serve.engine.tensors import Array, Tensors
from tests.models import save_model

P = ParamSpec("P")
WAIT_S = 60.0
STATE = 'state { input_name: "total" output_name: "new_total" data_type: TYPE_FP32 dims: 1 }'
SUM = f"max_batch_size: 4 sequence_batching {{ max_sequence_idle_microseconds: 60000000 oldest {{ }} {STATE} }}"
TELLING = """control_input { name: "start" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } }
    control_input { name: "end" control { kind: CONTROL_SEQUENCE_END int32_false_true: [ 5, 6 ] } }
    control_input { name: "ready" control { kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ] } }
    control_input { name: "id" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }"""


def save_sum(path: Path, *, factor: float = 1.0) -> Path:
    """x, total FP32 [batch, 1] -> y, new_total: the sum of x so far, plus total of old. Fails where |x| is beyond an index.

    The index is looked up in a table, so that a value of x above 99 fails inside the runtime.
    """
    nodes = [
        helper.make_node("Cast", ["x"], ["index"], to=TensorProto.INT64),
        helper.make_node("Gather", ["table", "index"], ["value"], axis=0),
        helper.make_node("Add", ["value", "total"], ["new_total"]),
        helper.make_node("Identity", ["new_total"], ["y"]),
    ]
    number = TensorProto.FLOAT
    inputs: list[tuple[str, int, list[int | str]]] = [("x", number, ["batch", 1]), ("total", number, ["batch", 1])]
    outputs: list[tuple[str, int, list[int | str]]] = [("y", number, ["batch", 1]), ("new_total", number, ["batch", 1])]
    return save_model(path, nodes, inputs, outputs, {"table": np.arange(100, dtype=np.float32) * np.float32(factor)})


def save_telling(path: Path, *, id_type: int = TensorProto.UINT64) -> Path:
    """Returns its controls: start FP32, end INT32, ready BOOL and id [batch, 1], each as an output told_..., and y = x."""
    types: dict[str, int] = {
        "x": TensorProto.FLOAT,
        "start": TensorProto.FLOAT,
        "end": TensorProto.INT32,
        "ready": TensorProto.BOOL,
    }
    types["id"] = id_type
    outputs = {name: "y" if name == "x" else f"told_{name}" for name in types}
    nodes: list[NodeProto] = [helper.make_node("Identity", [name], [output]) for name, output in outputs.items()]
    return save_model(
        path,
        nodes,
        [(name, number, ["batch", 1]) for name, number in types.items()],
        [(output, types[name], ["batch", 1]) for name, output in outputs.items()],
    )


class Held:
    """A backend that computes nothing until `release` is set.

    Attributes:
        entered: released once for each batch that has reached the thread.
        batches: the values of x, of each batch in order.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.release = threading.Event()
        self.release.set()
        self.entered = threading.Semaphore(0)
        self.batches: list[list[float]] = []
        self.provider = "test"  # not on the event loop
        self.precision = backend.precision

    def compute_dtype(self, name: str) -> np.dtype[Any]:
        return self._backend.compute_dtype(name)

    def run(self, inputs: Tensors) -> Tensors:
        self.batches.append([float(value) for value in inputs["x"][:, 0]])
        self.entered.release()
        assert self.release.wait(WAIT_S)
        return self._backend.run(inputs)

    def give_up(self) -> None:
        self._backend.give_up()


class Scene:
    """One model with sequences, and the answers to its requests.

    Attributes:
        held: its only copy.
        model: as served.
        scheduler: of the model.
    """

    def __init__(self, root: Path, defaults: Defaults | None = None) -> None:
        """`root` is a repository with one model."""
        (files,) = find_models(root)
        placement = DevicePlacement(use_gpu=False, threads=1)
        version = load_version(files, OnnxRuntime(), placement, defaults or Defaults())
        self.held = Held(version.backends[0])
        self.model: Model = started(replace(version, backends=[self.held]))
        assert isinstance(self.model.scheduler, SequenceScheduler)
        self.scheduler: SequenceScheduler = self.model.scheduler

    def request(
        self,
        key: int | str,
        x: float,
        *,
        start: bool = False,
        end: bool = False,
        outputs: tuple[str, ...] = ("y",),
        leave_by: float | None = None,
        more: dict[str, Parameter] | None = None,
    ) -> tuple[InferRequest, asyncio.Future[dict[str, Array]]]:
        future: asyncio.Future[dict[str, Array]] = asyncio.get_running_loop().create_future()

        def done(result: Tensors | InferenceError) -> None:
            if isinstance(result, InferenceError):
                future.set_exception(result)
            else:
                future.set_result({name: np.array(array) for name, array in result.items()})

        parameters: dict[str, Parameter] = {"sequence_id": key, "sequence_start": start, "sequence_end": end, **(more or {})}
        inputs = {"x": np.full((1, 1), x, np.float32)}
        request = InferRequest(inputs, outputs, 1, (1,), None, done, leave_by=leave_by, size=4, parameters=parameters)
        return request, future

    def send(self, key: int | str, x: float, **how: Any) -> asyncio.Future[dict[str, Array]]:
        """Submit a request; its answer."""
        request, future = self.request(key, x, **how)
        self.scheduler.submit(request)
        return future

    async def step(self, key: int | str, x: float, **how: Any) -> float:
        """Submit a request and wait for y."""
        return float((await asyncio.wait_for(self.send(key, x, **how), WAIT_S))["y"][0, 0])

    async def hold(self) -> None:
        """Let no batch end from now on."""
        self.held.release.clear()

    async def until_computing(self) -> None:
        """Wait until a further batch has reached the thread."""
        assert await asyncio.to_thread(self.held.entered.acquire, timeout=WAIT_S)


def play(root: Path, test: Callable[[Scene], Awaitable[None]], defaults: Defaults | None = None) -> None:
    """Run a test on the model of a repository, and drain the model."""

    async def main() -> None:
        scene = Scene(root, defaults)
        try:
            await test(scene)
        finally:
            scene.held.release.set()
            await asyncio.wait_for(scene.scheduler.drain(), WAIT_S)

    asyncio.run(main())


def played(make: Callable[[Path], Path]) -> Callable[[Callable[Concatenate[Scene, P], Awaitable[None]]], Callable[..., None]]:
    """Run a test on the model that `make` writes into a folder; see `play`."""

    def decorated(test: Callable[Concatenate[Scene, P], Awaitable[None]]) -> Callable[..., None]:
        @wraps(test)
        def playing(tmp_path: Path, *fixtures: P.args, **named: P.kwargs) -> None:
            play(make(tmp_path), lambda scene: test(scene, *fixtures, **named))

        _, *parameters = inspect.signature(test).parameters.values()
        folder = inspect.Parameter("tmp_path", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        playing.__signature__ = inspect.Signature([folder, *parameters])  # type: ignore[attr-defined]  # (pytest reads it)
        return playing

    return decorated


def sum_model(root: Path, config: str = SUM) -> Path:
    save_sum(root / "sum" / "1" / "model.onnx")
    (root / "sum" / "config.pbtxt").write_text(config)
    return root
