"""Element types of the values that a graph sees: its own, and those of the graphs around it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx
from onnx import TensorProto

from export.onnx_fp16.element_types.signatures import Signature, signature_named

FLOATS: dict[int, str] = {
    TensorProto.FLOAT16: "tensor(float16)",
    TensorProto.FLOAT: "tensor(float)",
    TensorProto.DOUBLE: "tensor(double)",
    TensorProto.BFLOAT16: "tensor(bfloat16)",
}


class ElementTypes:
    """What is known while a graph is walked in order.

    Args:
        opsets: The model's opsets by domain.
        outer: Types by name that are known already.
    """

    def __init__(self, opsets: Mapping[str, int], outer: Mapping[str, int] | None = None) -> None:
        self._opsets = opsets
        self._types = dict(outer or {})

    @property
    def opset(self) -> int:
        """The version of ONNX's own operators."""
        return self._opsets.get("", self._opsets.get("ai.onnx", 1))

    def within(self, graph: onnx.GraphProto) -> ElementTypes:
        """The types that a body sees, with what it declares itself."""
        inner = ElementTypes(self._opsets, self._types)
        for value in [*graph.input, *graph.output, *graph.value_info]:
            kind = value.type.WhichOneof("value")
            if kind is not None:
                inner._types[value.name] = value.type.tensor_type.elem_type if kind == "tensor_type" else TensorProto.UNDEFINED
        for initializer in graph.initializer:
            inner._types[initializer.name] = initializer.data_type
        return inner

    def guess(self, node: onnx.NodeProto) -> None:
        """Give results of unknown type what the operator's signature says of them, else the node's first floating input's."""
        floats = [self._types[name] for name in node.input if self._types.get(name) in FLOATS]
        signature = signature_named(node.domain, node.op_type, self._opsets)
        bound = {} if signature is None else dict(self._bound(node, signature))
        for index, name in enumerate(node.output):
            if not name or name in self._types:
                continue
            formal = signature.output(index) if signature is not None else None
            kind = bound.get(formal.type_str) if formal is not None else None
            kind = kind or next((kind for kind in floats if formal is None or FLOATS[kind] in formal.types), None)
            if kind is not None:
                self._types[name] = kind

    def is_half(self, name: str) -> bool:
        """Whether a value is known to be float16."""
        return self._types.get(name) == TensorProto.FLOAT16

    def _bound(self, node: onnx.NodeProto, signature: Signature) -> Iterator[tuple[str, int]]:
        """What the node's inputs say of the signature's type variables."""
        for index, name in enumerate(node.input):
            formal = signature.input(index)
            if formal is not None and not (formal.variadic and not formal.homogeneous) and self._types.get(name):
                yield formal.type_str, self._types[name]
