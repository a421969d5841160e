"""Where a node can take and give float16: by its operator's signature at the model's opset, place by place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir

from export.onnx_fp16.element_types.schema_types import type_text
from export.onnx_fp16.element_types.signatures import Formal, signature_of
from export.onnx_fp16.graph_walk import is_float

# Attributes that say an output's type.
TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype", "output_datatype")


@dataclass(frozen=True, kw_only=True)
class Places:
    """For each actual input and output of a node, whether it is float32 now and can be float16.

    Attributes:
        inputs: By input index.
        outputs: By output index.
    """

    inputs: tuple[bool, ...]
    outputs: tuple[bool, ...]

    @property
    def some(self) -> bool:
        """Whether there is any such place."""
        return any(self.inputs) or any(self.outputs)


def half_places(node: onnx_ir.Node, opsets: Mapping[str, int]) -> Places:
    """The places of a node that could be float16."""
    signature = signature_of(node, opsets)
    if signature is None:
        return Places(inputs=(False,) * len(node.inputs), outputs=(False,) * len(node.outputs))
    return Places(
        inputs=tuple(_can_be_half(value, signature.input(index)) for index, value in enumerate(node.inputs)),
        outputs=tuple(_can_be_half(value, signature.output(index)) for index, value in enumerate(node.outputs)),
    )


def computes_on_floats(node: onnx_ir.Node) -> bool:
    """Whether any input or output is float32 or float16."""
    values = [value for value in (*node.inputs, *node.outputs) if value is not None and value.type is not None]
    return any(value.dtype in (onnx_ir.DataType.FLOAT, onnx_ir.DataType.FLOAT16) for value in values)


def _can_be_half(value: onnx_ir.Value | None, formal: Formal | None) -> bool:
    if value is None or formal is None or not is_float(value):
        return False
    text = "tensor(float)" if type(value.type) is onnx_ir.TensorType else type_text(value)
    return text.replace("tensor(float)", "tensor(float16)") in formal.types
