"""Ask a model without a transport."""

from __future__ import annotations

import asyncio

import numpy as np

from serve.engine.errors import InferenceError
from serve.engine.model import Model
from serve.engine.requests import InferRequest
from serve.engine.tensors import Array, Tensors

WAIT_S = 20.0


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
