"""Ensembles on the real core and batchers, over backends that a test can hold."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import text_format

from halfserve.protos.datatypes import BY_WIRE
from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.engine.backend import ModelInterface
from halfserve.serve.engine.config.batching import batch_limits
from halfserve.serve.engine.config.model_config import DeclaredConfig, Defaults
from halfserve.serve.engine.ensembles.composition import EnsembleComposition
from halfserve.serve.engine.errors import InferenceError
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.repository.model_loading import load_ensemble
from halfserve.serve.engine.repository.model_repository import ModelFiles
from halfserve.serve.engine.requests import InferRequest, Parameter, Respond
from halfserve.serve.engine.tensors import Tensors, TensorSpec
from tests.serve.engine.fakes import FakeBackend

WAIT_S = 60.0
Shape = tuple[int, ...]
Compute = Callable[[Tensors], Tensors]


def add(number: float) -> Compute:
    return lambda inputs: {"y": inputs["x"] + np.float32(number)}


class StepBackend(FakeBackend):
    """Computes with a function; nothing until `release` is set."""

    def __init__(self, compute: Compute, *, held: bool = False) -> None:
        self._compute = compute
        self.entered = threading.Event()  # set when a batch has reached the worker thread
        self.release = threading.Event()  # set it to let batches through
        self.batches: list[Tensors] = []  # the inputs of each batch that was tried, in order
        if not held:
            self.release.set()

    def run(self, inputs: Tensors) -> Tensors:
        self.entered.set()
        assert self.release.wait(WAIT_S)
        self.batches.append(dict(inputs))
        return self._compute(inputs)


def specs(tensors: Mapping[str, tuple[str, Shape]]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name=n, datatype=BY_WIRE[wire], shape=shape) for n, (wire, shape) in tensors.items())


def model(
    name: str,
    backend: StepBackend | None = None,
    *,
    inputs: Mapping[str, tuple[str, Shape]] | None = None,
    outputs: Mapping[str, tuple[str, Shape]] | None = None,
    config: str = "max_batch_size: 8",
    version: int = 1,
    max_waiting: int = 100,
) -> Model:
    """A model x FP32 [-1, 1] -> y FP32 [-1, 1] that adds 1, unless told otherwise."""
    message = text_format.Parse(config, ModelConfig(name=name))
    batched = message.max_batch_size > 0
    one = ("FP32", (-1, 1))
    interface = ModelInterface(inputs=specs(inputs or {"x": one}), outputs=specs(outputs or {"y": one}), batched=batched)
    return Model(
        name=name,
        version=version,
        interface=interface,
        config=message,
        backends=[backend or StepBackend(add(1))],
        limits=batch_limits(message, Defaults(max_queue_size=max_waiting)),
    ).start()


def made(text: str, name: str = "pipe") -> Model:
    source = Path(name) / "config.pbtxt"
    declared = DeclaredConfig(message=text_format.Parse(text, ModelConfig()), source=source, says_batch_size=True)
    return load_ensemble(ModelFiles(name=name, version=1, model=source, config=declared), Defaults())


def serve(core: InferenceCore, text: str, name: str = "pipe") -> Model:
    served = made(text, name)
    assert isinstance(served.composition, EnsembleComposition)
    served.composition.connect(core)
    core.replace(name, [served])
    return served


class Asked:
    def __init__(self, core: InferenceCore, served: Model, inputs: Mapping[str, Any], **given: Any) -> None:
        """Submit it; `given` as InferRequest takes it."""
        self._result: asyncio.Future[Tensors | InferenceError] = asyncio.get_running_loop().create_future()
        self._model = served
        arrays = {name: np.asarray(value, np.float32) for name, value in inputs.items()}
        rows = len(next(iter(arrays.values()))) if served.max_batch_size else 1
        outputs = given.pop("outputs", tuple(served.outputs))
        parameters: Mapping[str, Parameter] = given.pop("parameters", {})
        respond: Respond | None = given.pop("respond", None)
        self.request = InferRequest(
            arrays, outputs, rows, (1,), given.pop("deadline", None), self._result.set_result, parameters=parameters, **given
        )
        self.request.respond = respond
        core.submit(served, self.request)

    @property
    def is_done(self) -> bool:
        return self._result.done()

    def cancel(self) -> None:
        self._model.scheduler.cancel(self.request)

    async def result(self) -> Tensors | InferenceError:
        return await asyncio.wait_for(self._result, WAIT_S)

    async def value(self, name: str = "out") -> Any:
        result = await self.result()
        assert not isinstance(result, InferenceError), result
        return result[name].tolist()

    async def error(self) -> InferenceError:
        result = await self.result()
        assert isinstance(result, InferenceError)
        return result


def have(core: InferenceCore, *models: Model) -> None:
    for each in models:
        core.replace(each.name, [each])
