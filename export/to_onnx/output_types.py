"""An exported graph must answer in the dtypes that the torch model answers in."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir
from onnx_ir.tensor_adapters import from_torch_dtype
from torch import Tensor


def restore_output_types(model: onnx_ir.Model, results: Sequence[Tensor]) -> None:
    """Add the cast that torch's exporter leaves out where a float16 reduction is an output of the graph.

    A float16 sum is exported as Cast to float32, ReduceSum, Cast back; with torch 2.13 the last cast is missing when the sum is
    the graph's output, which then is float32 although the model's is float16. The model is changed in place.

    Args:
        model: The exported model.
        results: What the torch model returned, one tensor per output of the graph.
    """
    for index, (output, result) in enumerate(zip(model.graph.outputs, results, strict=True)):
        wanted = from_torch_dtype(result.dtype)
        if output.dtype == wanted or not result.is_floating_point():
            continue
        cast = onnx_ir.node("Cast", [output], {"to": wanted.value}, name=f"{output.name}/restore_type")
        producer = output.producer()
        if producer is not None:
            cast.metadata_props.update(producer.metadata_props)
        restored = cast.outputs[0]
        restored.name, output.name = output.name, f"{output.name}/{output.dtype.name.lower() if output.dtype else 'untyped'}"
        restored.type, restored.shape = onnx_ir.TensorType(wanted), output.shape
        model.graph.append(cast)
        model.graph.outputs[index] = restored
