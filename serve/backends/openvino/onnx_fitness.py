"""Reasons for which an ONNX model is not given to OpenVINO. The module needs no OpenVINO.

The operators are the ones whose node tests of ONNX OpenVINO 2026.4.1 answers with other values than the standard demands.
tests/serve/backends/test_openvino_operators.py runs these tests again.
"""

from __future__ import annotations

from onnx import ModelProto, NodeProto, TensorProto

from halfserve.protos.onnx_tensors import all_tensors
from halfserve.serve.backends.onnx_runtime.onnx_file import nodes_below
from halfserve.serve.backends.onnx_runtime.onnx_interface import STANDARD, is_open_ended

# Operators that OpenVINO computes otherwise in one case at least: windows and empty masks of attention; batches first in
# recurrent layers; the maximum of nothing but -inf; rounded sizes and antialiasing in Resize; equal values in TopK; shifts of
# negative numbers; the rounding of halves where it quantizes. What it refuses need not be here.
WRONG = frozenset(
    {
        *("Attention", "BitShift", "DFT", "DynamicQuantizeLinear", "GRU", "LSTM", "NonMaxSuppression", "QuantizeLinear", "RNN"),
        *("ReduceMax", "ReduceMin", "Resize", "RoiAlign", "SpaceToDepth", "TopK"),
    }
)
# There is no right answer to compare with.
RANDOM = frozenset({"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"})
# float64 becomes float32 there, and texts end its process.
UNFIT_TYPES = {TensorProto.DOUBLE: "float64", TensorProto.STRING: "text"}
# Reductions whose attribute `axes` (opsets 13 to 17) OpenVINO 2026.4.1 does not read: it reduces over every axis.
AXES_UNREAD = frozenset({"ReduceL1", "ReduceLogSum", "ReduceLogSumExp"})


def why_unfit(model: ModelProto) -> str | None:
    """Why a model is left to ONNX Runtime; None where OpenVINO may compute it. Weights may be left out of the model."""
    own = {(function.domain, function.name) for function in model.functions}
    for node in nodes_below(model.graph.node, *(function.node for function in model.functions)):
        if (node.domain, node.op_type) not in own and _is_unfit(node):
            return f"OpenVINO does not compute its operator {node.op_type} as ONNX defines it"
    values = [value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)]
    for number in (*values, *(tensor.data_type for tensor in all_tensors(model))):
        if number in UNFIT_TYPES:
            return f"OpenVINO does not compute in {UNFIT_TYPES[number]}, which it uses"
    if is_open_ended(model):
        return "sizes in it depend on values, which OpenVINO does not check"
    return None


def _is_unfit(node: NodeProto) -> bool:
    if node.op_type == "MaxPool":  # it counts a last window that lies in the padding
        return any(attribute.name == "ceil_mode" and attribute.i for attribute in node.attribute)
    if node.op_type in AXES_UNREAD and any(attribute.name == "axes" for attribute in node.attribute):
        return True
    return node.op_type in WRONG | RANDOM or node.domain not in STANDARD
