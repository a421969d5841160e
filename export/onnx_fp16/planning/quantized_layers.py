"""What lies between layers that quantize their inputs while the model runs.

Such a layer measures its input's range and cuts it into 255 steps; only float32 goes in. A number that float16 moves across the
border of a step changes the product by a whole step, which moves the range of the next layer and with it all its steps: the
differences of float16, harmless elsewhere, do not fade here but add up, layer by layer. And there is nothing to win: the
weights are integers, and the operators of such models have no float16 kernels. So the norms and activations in between stay
float32. Layers with float weights of their own do not: those shrink.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import onnx_ir

from export.onnx_fp16.graph_walk import all_nodes, bodies, constant_of, is_float
from export.onnx_fp16.planning.op_sets import operators

REASON = "between layers that quantize what they get: float16 moves it across quantization steps"

_ORT = "com.microsoft"
_QUANTIZERS = frozenset({("", "DynamicQuantizeLinear"), (_ORT, "DynamicQuantizeLSTM"), (_ORT, "DynamicQuantizeMatMul")})
_PRODUCTS = frozenset(
    {("", "ConvInteger"), ("", "MatMulInteger"), (_ORT, "DynamicQuantizeLSTM"), (_ORT, "DynamicQuantizeMatMul")}
    | {(_ORT, "MatMulIntegerToFloat"), (_ORT, "QAttention")}
)
_WEIGHTED = operators("Conv ConvTranspose Einsum GRU Gather Gemm LSTM MatMul RNN")


def nodes_between(model: onnx_ir.Model) -> list[onnx_ir.Node]:
    """Float nodes on a way from an integer product to a layer that quantizes, over no layer with float weights; in order."""
    nodes = list(all_nodes(model))
    behind = _reached((node for node in nodes if _kind(node) in _PRODUCTS), _readers)
    if not behind:
        return []
    before = _reached((node for node in nodes if _kind(node) in _QUANTIZERS), _makers)
    return [node for node in nodes if node in behind and node in before and _is_light(node) and _computes(node)]


def _reached(starts: Iterable[onnx_ir.Node], step: Callable[[onnx_ir.Node], list[onnx_ir.Node]]) -> set[onnx_ir.Node]:
    """Where steps over light nodes lead, the starts included."""
    reached = set(starts)
    stack = list(reached)
    while stack:
        for node in step(stack.pop()):
            if node not in reached and _is_light(node):
                reached.add(node)
                stack.append(node)
    return reached


def _readers(node: onnx_ir.Node) -> list[onnx_ir.Node]:
    return [reader for value in node.outputs for reader in value.consumers()]


def _makers(node: onnx_ir.Node) -> list[onnx_ir.Node]:
    makers = (value.producer() for value in node.inputs if value is not None)
    return [maker for maker in makers if maker is not None]


def _is_light(node: onnx_ir.Node) -> bool:
    """Whether a node is neither a quantized layer, nor one with float weights, nor one with graphs inside."""
    if _kind(node) in _QUANTIZERS | _PRODUCTS or any(bodies(node)):
        return False
    return node.op_type not in _WEIGHTED or not any(is_float(value) and constant_of(value) is not None for value in node.inputs)


def _computes(node: onnx_ir.Node) -> bool:
    return node.op_type != "Constant" and any(is_float(value) for value in (*node.inputs, *node.outputs))


def _kind(node: onnx_ir.Node) -> tuple[str, str]:
    return node.domain, node.op_type
