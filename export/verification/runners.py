"""One way to run a model on arrays, whatever the model is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import onnx
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from export.errors import ExportError
from export.verification.metrics import Array
from export.verification.sessions import open_session, run_session

if TYPE_CHECKING:
    from onnx import ModelProto

Runner: TypeAlias = Callable[[Sequence[Array]], list[Array]]


def torch_runner(module: nn.Module) -> Runner:
    """Run a torch module in evaluation mode; its result's tensors come in the order in which `torch.export` flattens them.

    The runner raises ExportError with one line when the module fails.

    Raises:
        ExportError: The module is not a float32 one in evaluation mode: no reference.
    """
    if any(part.training for part in module.modules()):
        raise ExportError("the reference model is in training mode; call .eval() first")
    if any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in module.parameters()):
        raise ExportError("the reference model holds half-precision weights; expected the float32 model that was converted")

    def run(inputs: Sequence[Array]) -> list[Array]:
        try:
            with torch.no_grad():
                result = module(*(torch.from_numpy(np.ascontiguousarray(array)) for array in inputs))
        except Exception as error:
            raise ExportError(f"the reference model fails on the samples: {str(error).splitlines()[0]}") from error
        return [leaf.detach().numpy() for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]

    return run


def onnx_runner(model: ModelProto, content: bytes, level: str) -> Runner:
    """Run an ONNX model on the CPU; floating inputs are cast to the model's own floating types.

    The runner raises ExportError with one line when the inputs do not fit.

    Raises:
        ExportError: ONNX Runtime refuses the model.
    """
    session = open_session(content, level)
    initialized = {tensor.name for tensor in model.graph.initializer}
    wanted = [value for value in model.graph.input if value.name not in initialized]

    def run(inputs: Sequence[Array]) -> list[Array]:
        if len(inputs) != len(wanted):
            names = ", ".join(value.name for value in wanted)
            raise ExportError(f"the model takes {len(wanted)} inputs ({names}), {len(inputs)} were given")
        feeds = {value.name: _fitting(array, value) for array, value in zip(inputs, wanted, strict=True)}
        return list(run_session(session, feeds).values())

    return run


def _fitting(array: Array, value: onnx.ValueInfoProto) -> Array:
    dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
    floating = np.issubdtype(array.dtype, np.floating) and np.issubdtype(dtype, np.floating)
    if array.dtype != dtype and not floating:
        raise ExportError(f"input {value.name!r} is {array.dtype}, the model expects {dtype}")
    with np.errstate(over="ignore"):  # an overflow here shows up as a non-finite output, and is counted there
        return array.astype(dtype, copy=False)
