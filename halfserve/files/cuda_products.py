"""Settings of ONNX Runtime's CUDA provider on which the results of products depend; all stages use the same.

Float32 products are TF32 by default: their operands are rounded to 11 significant bits, as many as float16 has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from halfserve.files.onnx_tensors import all_tensors

FLOAT, FLOAT16, DOUBLE, BFLOAT16 = 1, 10, 11, 16  # numbers in onnx.TensorProto.DataType
HALVES = frozenset({FLOAT16, BFLOAT16})
FLOATS = HALVES | {FLOAT, DOUBLE}
CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})
STATING = frozenset({"to", "dtype", "output_dtype"})  # attributes that hold a type
TF32 = "use_tf32"
# Environment variables that the provider reads when it loads. 2: cuBLAS adds the parts of a half-precision product in float32,
# where it would add those of a long sum in the half type, and float16 ends at 65,504.
CUDA_ENVIRONMENT = {"ORT_CUDA_GEMM_OPTIONS": "2"}


def product_options(model: Any) -> dict[str, str]:
    """Return provider options for a ModelProto: no TF32, unless a convolution computes in half precision.

    In ONNX Runtime 1.31, CUDA computes such convolutions without tensor cores where TF32 is off.
    """
    return {} if has_half_convolution(model) else {TF32: "0"}


def has_half_convolution(model: Any) -> bool:
    """Return whether a Conv or ConvTranspose of a ModelProto computes in float16 or bfloat16, or may do so.

    Types come from declarations, casts and the operands before, without shape inference; in functions they are not known.
    """
    if not _has_halves(model):
        return False
    functions = (node for function in model.functions for node in function.node)
    return _convolves(model.graph, {}) or any(node.op_type in CONVOLUTIONS for node in functions)


def _has_halves(model: Any) -> bool:
    """Return whether a weight, an input, an output or a cast is in half precision, functions and bodies included."""
    values = (*model.graph.input, *model.graph.output)
    return (
        any(tensor.data_type in HALVES for tensor in all_tensors(model))
        or any(value.type.tensor_type.elem_type in HALVES for value in values)
        or any(_casts(nodes) for nodes in (model.graph.node, *(function.node for function in model.functions)))
    )


def _casts(nodes: Iterable[Any]) -> bool:
    """Return whether a node states a half-precision type in an attribute."""
    return any(
        any(attribute.name in STATING and attribute.i in HALVES for attribute in node.attribute)
        or any(_casts(body.node) for body in _bodies(node))
        for node in nodes
    )


def _convolves(graph: Any, outer: Mapping[str, int]) -> bool:
    types = dict(outer)
    for value in (*graph.input, *graph.output, *graph.value_info):
        types[value.name] = value.type.tensor_type.elem_type
    types.update((tensor.name, tensor.data_type) for tensor in graph.initializer)
    for node in graph.node:
        known = [types[name] for name in node.input if types.get(name) in FLOATS]
        if node.op_type in CONVOLUTIONS and (not known or known[0] in HALVES):
            return True
        made = _made(node) or (known[0] if known else 0)
        for name in node.output:
            if made and not types.get(name):
                types[name] = made
        if any(_convolves(body, types) for body in _bodies(node)):
            return True
    return False


def _made(node: Any) -> int:
    """Return the type that a Cast or a Constant states; 0 for any other node."""
    for attribute in node.attribute:
        if node.op_type == "Cast" and attribute.name == "to":
            return int(attribute.i)
        if node.op_type == "Constant" and attribute.name == "value":
            return int(attribute.t.data_type)
        if node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
            return FLOAT
    return 0


def _bodies(node: Any) -> Iterator[Any]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs
