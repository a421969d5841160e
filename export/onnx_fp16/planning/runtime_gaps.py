"""Where ONNX Runtime's CPU provider cannot run float16, though ONNX allows it.

It lacks float16 kernels for most operators, and then raises a node's float16 inputs to float32 by casts of its own. That does
not help where there is no such input, or where a kernel takes float16 but refuses it once it runs. Measured with ONNX Runtime
1.31.1, by converting ONNX's backend tests and running them.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir

from export.onnx_fp16.graph_walk import is_float

_REFUSED_WITH_REDUCTION = frozenset({"ScatterElements", "ScatterND"})
# They make floats out of no float, and have no float16 kernel.
_MAKERS = frozenset({"BlackmanWindow", "HammingWindow", "HannWindow", "MelWeightMatrix", "RandomNormal", "RandomUniform"})
_MAKERS_LIKE = frozenset({"Bernoulli", "EyeLike", "RandomNormalLike", "RandomUniformLike"})  # which have one for float16 inputs


def runtime_gap(node: onnx_ir.Node) -> str | None:
    """Why ONNX Runtime's CPU cannot run this node in float16; None where it can."""
    if node.domain:
        return None
    reduction = node.attributes.get_string("reduction", "none") if node.op_type in _REFUSED_WITH_REDUCTION else "none"
    if reduction != "none":
        return f"{node.op_type} with reduction {reduction!r}: ONNX Runtime's CPU provider has no float16 kernel"
    if node.op_type in _MAKERS or (node.op_type in _MAKERS_LIKE and not is_float(node.inputs[0])):
        return f"{node.op_type}: ONNX Runtime's CPU provider has no float16 kernel"
    if node.op_type == "MeanVarianceNormalization":  # its function says Pow(float16, float) before opset 13: ONNX refuses it
        return "MeanVarianceNormalization: ONNX Runtime takes it apart in float16, and its squares overflow"
    if _crashes(node):
        return "Transpose before MatMul: ONNX Runtime 1.31 crashes when it fuses the two in float16"
    return None


def _crashes(node: onnx_ir.Node) -> bool:
    """Whether ONNX Runtime's fusion of this Transpose with the product behind it ends the process.

    It fuses a Transpose that moves the first axis to the place before the last, or to the last one, into a MatMul by a matrix
    of weights; where a cast stands between the two, as it does for float16, it reads what is not there. In float32 it is fine.
    """
    if node.op_type != "Transpose" or node.domain:
        return False
    perm = tuple(node.attributes.get_ints("perm", ()))
    rank = len(perm)
    moved = {(*range(1, rank - 1), 0, rank - 1), (*range(1, rank), 0)}
    return rank > 2 and perm in moved and any(_multiplies(user, index) for user, index in _readers(node.outputs[0]))


def _readers(value: onnx_ir.Value) -> Iterator[tuple[onnx_ir.Node, int]]:
    for user, index in value.uses():
        if user.op_type in ("Cast", "Identity") and not user.domain:
            yield from _readers(user.outputs[0])
        else:
            yield user, index


def _multiplies(node: onnx_ir.Node, index: int) -> bool:
    if node.op_type != "MatMul" or node.domain or index != 0:
        return False
    weight = node.inputs[1]
    return weight is not None and weight.shape is not None and len(weight.shape) == 2
