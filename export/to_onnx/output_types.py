"""An exported graph must answer in the dtypes that the torch model answers in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx
import torch
from onnx import TensorProto, helper

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

ONNX_TYPES = {
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.float32: TensorProto.FLOAT,
    torch.float64: TensorProto.DOUBLE,
}


def restore_output_types(model: onnx.ModelProto, results: Sequence[Tensor]) -> None:
    """Add the cast that torch's exporter leaves out where a float16 reduction is an output of the graph.

    A float16 sum is exported as Cast to float32, ReduceSum, Cast back; with torch 2.13 the last cast is missing when the sum is
    the graph's output, which then is float32 although the model's is float16. The model is changed in place.

    Args:
        model: The exported model.
        results: What the torch model returned, one tensor per output of the graph.
    """
    for output, result in zip(model.graph.output, results, strict=True):
        tensor = output.type.tensor_type
        wanted = ONNX_TYPES.get(result.dtype, tensor.elem_type)
        if tensor.elem_type == wanted:
            continue
        wide = f"{output.name}/{TensorProto.DataType.Name(tensor.elem_type).lower()}"
        for node in model.graph.node:
            _rename(node.output, output.name, wide)
            _rename(node.input, output.name, wide)
        cast = helper.make_node("Cast", [wide], [output.name], name=f"{output.name}/restore_type", to=wanted)
        model.graph.node.append(cast)
        tensor.elem_type = wanted


def _rename(names: Sequence[str], old: str, new: str) -> None:
    for index, name in enumerate(names):
        if name == old:
            names[index] = new  # type: ignore[index]  # (a repeated field of protobuf, which can be assigned to)
