"""Models with and without fp32 twins, and requests to them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from halfserve.serve.backends.onnx_runtime.onnx_backend import OnnxRuntime
from halfserve.serve.engine.backend import DevicePlacement, Runtime
from halfserve.serve.engine.config.model_config import Defaults
from halfserve.serve.engine.errors import InferenceError
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.repository.model_loading import load_model
from halfserve.serve.engine.repository.model_repository import find_models
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.tensors import Array, Tensors
from tests.models import save_table, save_thousandfold

TWIN = Path("1/fp32/model.onnx")


def config_text(**parameters: str) -> str:
    """A config.pbtxt with these halfserve.* parameters, and batches."""
    entries = [
        f'parameters {{ key: "halfserve.{name}" value {{ string_value: "{value}" }} }}' for name, value in parameters.items()
    ]
    return "\n".join(["max_batch_size: 8", *entries])


def write_table(folder: Path, *, twin: bool = True, **parameters: str) -> Path:
    """The table model in fp16, of which row 1 is infinite; with its fp32 twin it answers 49,152 there."""
    save_table(folder / "1" / "model.onnx", np.float16)
    if twin:
        save_table(folder / TWIN, np.float32)
    (folder / "config.pbtxt").write_text(config_text(**parameters))
    return folder


def write_thousandfold(folder: Path, **parameters: str) -> Path:
    """The model that multiplies by 1000 in fp16, and its fp32 twin."""
    save_thousandfold(folder / "1" / "model.onnx", np.float16)
    save_thousandfold(folder / TWIN, np.float32)
    (folder / "config.pbtxt").write_text(config_text(**parameters))
    return folder


def load(repository: Path, runtime: Runtime | None = None) -> list[Model]:
    """Every model of a repository, on one CPU thread."""
    placement = DevicePlacement(use_gpu=False, threads=1)
    return [load_model(files, runtime or OnnxRuntime(), placement, Defaults()) for files in find_models(repository)]


WAIT_S = 60.0


async def ask_model(model: Model, array: Array) -> list[float] | str:
    """The model's answer to its only input, flat, or the text of its error. Requests of one turn of the loop share a batch."""
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[Tensors | InferenceError] = loop.create_future()
    (name,), (output,) = model.inputs, model.outputs
    model.batcher.submit(
        InferRequest(
            inputs={name: array},
            outputs=(output,),
            rows=array.shape[0],
            bucket=array.shape[1:],
            deadline=None,
            done=answered.set_result,
        )
    )
    result = await asyncio.wait_for(answered, WAIT_S)
    if isinstance(result, InferenceError):
        return str(result)
    return [float(v) for v in np.ravel(result[output])]
