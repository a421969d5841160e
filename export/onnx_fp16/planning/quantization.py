"""Nodes of quantized models that stay float32.

ONNX Runtime breaks models when it optimizes QuantizeLinear and DequantizeLinear with float16 scales. Seen with ONNX Runtime
1.31.1, from ORT_ENABLE_BASIC on, with every provider; in float32 both optimizations are correct:

- It computes a Concat of dequantized tensors whose result is quantized on the integers, with QLinearConcat. That takes scales
  in float32 alone, and the model cannot be opened.
- It quantizes the bias of a Conv, ConvTranspose or Gemm between quantized tensors, with the product of both scales as the
  scale. In float16 that product is subnormal or 0, or the quotient overflows, and the layer adds another bias.

float16 itself breaks a scale below 2**-14, as that of a bias often is: it keeps few digits, and every scaled number loses them.

Dynamic quantization measures the range of a layer's input at run time and cuts it into 255 steps; the layer takes only float32.
A number that float16 moves across the border of a step changes the product by a whole step, which moves the range of the next
layer and all its steps: the differences add up from layer to layer. There is nothing to gain: the weights are integers, and the
operators of such models have no float16 kernels. So the norms and activations between such layers stay float32. Layers with
float weights of their own do not, as their weights shrink.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import onnx_ir

from halfserve.export.half_types import FP16_MAX, FP16_SMALLEST_NORMAL, HalfType
from halfserve.export.onnx_fp16.graph import MOVERS, all_nodes, bodies, constant_of, is_float, operators

CONCAT_REASON = "between quantized tensors: ONNX Runtime joins those as integers, with scales in float32 alone"
BIAS_REASON = "ONNX Runtime quantizes the layer's bias with the product of both scales, which float16 cannot hold"
SCALE_REASON = "its scale of {:.3g} keeps few digits in float16"
STEP_REASON = "its scale keeps 8 bits in bfloat16, and 255 steps of it would be off by more than one"

_QUANTIZES, _DEQUANTIZES = "QuantizeLinear", "DequantizeLinear"
_DOMAINS = ("", "com.microsoft")
# The runtime moves quantization past these, or drops them.
_PASSED = (MOVERS | {"MaxPool"}) - {"Concat"}
_BIASED = frozenset({"Conv", "ConvTranspose", "Gemm"})
_ACTIVATIONS = frozenset({"Clip", "Relu"})
_ORT = "com.microsoft"
_QUANTIZERS = frozenset({("", "DynamicQuantizeLinear"), (_ORT, "DynamicQuantizeLSTM"), (_ORT, "DynamicQuantizeMatMul")})
_PRODUCTS = frozenset(
    {("", "ConvInteger"), ("", "MatMulInteger"), (_ORT, "DynamicQuantizeLSTM"), (_ORT, "DynamicQuantizeMatMul")}
    | {(_ORT, "MatMulIntegerToFloat"), (_ORT, "QAttention")}
)
_WEIGHTED = operators("Conv ConvTranspose Einsum GRU Gather Gemm LSTM MatMul RNN")


def between_reason(half: HalfType) -> str:
    return f"between layers that quantize what they get: {half.name} moves it across quantization steps"


def quantized_gaps(model: onnx_ir.Model, half: HalfType) -> Iterator[tuple[onnx_ir.Node, str]]:
    """Yield the nodes around static quantization that must be float32, each with the reason.

    In bfloat16 these are the quantizing nodes themselves, as a scale of 8 bits moves numbers by a step; then the rest is safe.
    """
    if half.has_float32_range:
        quantizers = (
            node for node in all_nodes(model) if node.op_type in (_QUANTIZES, _DEQUANTIZES) and node.domain in _DOMAINS
        )
        yield from ((node, STEP_REASON) for node in quantizers)
        return
    for node in all_nodes(model):
        if node.op_type in (_QUANTIZES, _DEQUANTIZES) and node.domain in _DOMAINS:
            smallest = _smallest_scale(node)
            if 0 < smallest < FP16_SMALLEST_NORMAL:
                yield node, SCALE_REASON.format(smallest)
        if node.domain:
            continue
        if node.op_type == "Concat":
            for kept in _integer_concat(node):
                yield kept, CONCAT_REASON
        elif node.op_type in _BIASED and len(node.inputs) == 3:
            scaled = _quantized_bias(node)
            if scaled is not None:
                yield scaled, BIAS_REASON


def _integer_concat(concat: onnx_ir.Node) -> list[onnx_ir.Node]:
    """Return the Concat with all nodes from a DequantizeLinear before each input to the QuantizeLinear behind; empty if one
    lacks.
    """
    ways = [_from_dequantizer(value) for value in concat.inputs]
    behind = _to_quantizer(concat, _PASSED)
    if not behind or not all(ways):
        return []
    return [*(node for way in ways for node in way), concat, *behind]


def _quantized_bias(layer: onnx_ir.Node) -> onnx_ir.Node | None:
    """Return the DequantizeLinear of a layer's weights, if the runtime quantizes the bias and float16 cannot hold
    the result.
    """
    data, weights = (_from_dequantizer(value) for value in layer.inputs[:2])
    bias = constant_of(layer.inputs[2])
    if not data or not weights or bias is None or not _to_quantizer(layer, _PASSED | _ACTIVATIONS):
        return None
    product = _smallest_scale(data[-1]) * _smallest_scale(weights[-1])
    largest = float(np.abs(bias.numpy()).max(initial=0.0))
    return weights[-1] if product < FP16_SMALLEST_NORMAL or largest > FP16_MAX * product else None


def _smallest_scale(dequantizer: onnx_ir.Node) -> float:
    """Return the smallest scale above 0; 0 where the scale is no constant, as it may be that small."""
    scale = constant_of(dequantizer.inputs[1])
    if scale is None:
        return 0.0
    sizes = np.abs(scale.numpy())
    return float(sizes.min(initial=np.inf, where=sizes > 0))


def _from_dequantizer(value: onnx_ir.Value | None) -> list[onnx_ir.Node]:
    """Return the nodes from a value's maker back to a DequantizeLinear, the last; empty where there is none."""
    way: list[onnx_ir.Node] = []
    while value is not None and (node := value.producer()) is not None and node.domain in _DOMAINS:
        way.append(node)
        if node.op_type == _DEQUANTIZES:
            return way
        if node.op_type not in _PASSED or node.domain:
            return []
        value = node.inputs[0]
    return []


def _to_quantizer(node: onnx_ir.Node, passed: frozenset[str]) -> list[onnx_ir.Node]:
    """Return the nodes behind a node up to a QuantizeLinear, if each has one reader; empty where there is none."""
    way: list[onnx_ir.Node] = []
    while len(readers := node.outputs[0].consumers()) == 1 and not node.outputs[0].is_graph_output():
        node = readers[0]
        if node.domain not in _DOMAINS:
            return []
        way.append(node)
        if node.op_type == _QUANTIZES:
            return way
        if node.op_type not in passed or node.domain:
            return []
    return []


def nodes_between(model: onnx_ir.Model) -> list[onnx_ir.Node]:
    """Float nodes on a path from an integer product to a layer that quantizes, without layers of float weights; in order."""
    nodes = list(all_nodes(model))
    behind = _reached((node for node in nodes if _kind(node) in _PRODUCTS), _readers)
    if not behind:
        return []
    before = _reached((node for node in nodes if _kind(node) in _QUANTIZERS), _makers)
    return [node for node in nodes if node in behind and node in before and _is_light(node) and _computes(node)]


def _reached(starts: Iterable[onnx_ir.Node], step: Callable[[onnx_ir.Node], list[onnx_ir.Node]]) -> set[onnx_ir.Node]:
    """Return the nodes reached by steps over light nodes, the starts included."""
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
    """Return whether a node is neither a quantized layer, nor one with float weights, nor one with graphs inside."""
    if _kind(node) in _QUANTIZERS | _PRODUCTS or any(bodies(node)):
        return False
    return node.op_type not in _WEIGHTED or not any(is_float(value) and constant_of(value) is not None for value in node.inputs)


def _computes(node: onnx_ir.Node) -> bool:
    return node.op_type != "Constant" and any(is_float(value) for value in (*node.inputs, *node.outputs))


def _kind(node: onnx_ir.Node) -> tuple[str, str]:
    return node.domain, node.op_type
