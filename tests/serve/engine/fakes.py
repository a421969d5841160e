"""A backend that a test can watch and hold, behind the real batcher."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from halfserve.protos.datatypes import BY_WIRE
from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.engine.backend import ModelInterface
from halfserve.serve.engine.dispatch.short_batches import NOTHING_KNOWN
from halfserve.serve.engine.errors import InferenceError
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.queueing.pace import BatchLimits
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.tensors import Tensors, TensorSpec

HOLD_S = 60.0


class FakeBackend:
    """The parts of a backend in float32 that its `run` does not decide."""

    provider = "test"
    precision = "fp32"

    def compute_dtype(self, name: str) -> np.dtype[Any]:
        return np.dtype(np.float32)

    def give_up(self) -> None:
        """Nothing."""


class Computing(FakeBackend):
    """Computes with a function, and keeps copies of what it was given."""

    def __init__(self, compute: Callable[[Tensors], Tensors]) -> None:
        self.seen: list[Tensors] = []
        self._compute = compute

    def run(self, inputs: Tensors) -> Tensors:
        self.seen.append({name: array.copy() for name, array in inputs.items()})
        return self._compute(inputs)


class HeldBackend(FakeBackend):
    """Adds 1 to x. Computes nothing until `release` is set; fails on a batch that holds a negative value."""

    def __init__(self, *, held: bool = False) -> None:
        self.entered = threading.Event()  # set when a batch has reached the worker thread
        self.release = threading.Event()  # set it to let batches through
        self.batches: list[list[float]] = []  # the rows of each batch that was tried, in order
        if not held:
            self.release.set()

    def run(self, inputs: Tensors) -> Tensors:
        self.entered.set()
        assert self.release.wait(HOLD_S)
        x = inputs["x"]
        self.batches.append([float(v) for v in x[:, 0]])
        if (x < 0).any():
            raise ValueError("negative values hurt")
        return {"y": x + 1}


class ByHand:
    """A scheduler whose requests the test answers: `submitted` holds them in order."""

    def __init__(self) -> None:
        self.submitted: list[InferRequest] = []
        self.cancelled: list[InferRequest] = []
        self.is_drained = False
        self.refusal: InferenceError | None = None

    def submit(self, request: InferRequest) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.submitted.append(request)

    def cancel(self, request: InferRequest) -> None:
        request.cancelled = True
        self.cancelled.append(request)

    @property
    def is_idle(self) -> bool:
        return True

    async def drain(self) -> None:
        self.is_drained = True


MEASURED = "OpenVINO in bfloat16 41 ms, ONNX Runtime in float32 84 ms for a batch of 8; they differ by 0.01 of the largest"


def measured_model(name: str = "held") -> Model:
    """A held model whose precisions were tried when it was loaded."""
    config = ModelConfig(max_batch_size=8)
    config.parameters["halfserve.measured"].string_value = MEASURED
    return held_model(HeldBackend(), name, config)


def held_model(
    backend: HeldBackend,
    name: str = "held",
    config: ModelConfig | None = None,
    short_s: Mapping[int, float] = NOTHING_KNOWN,
    *,
    others: Sequence[HeldBackend] = (),
    size: int = 1,
    open_ended: bool = False,
    **limits: Any,
) -> Model:
    """A model x FP32 [-1, size] -> y FP32 [-1, size] on the backend, and on others."""
    x, y = (TensorSpec(name=n, datatype=BY_WIRE["FP32"], shape=(-1, size)) for n in "xy")
    bounds = BatchLimits(**{"max_rows": 8, **limits})
    config = config or ModelConfig(max_batch_size=bounds.max_rows)
    config.name = name
    interface = ModelInterface(inputs=(x,), outputs=(y,), batched=True, open_ended=open_ended)
    backends = [backend, *others]
    model = Model(name=name, version=1, interface=interface, config=config, backends=backends, limits=bounds, short_s=short_s)
    return model.start()
