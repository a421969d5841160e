"""What ONNX Runtime breaks when it optimizes QuantizeLinear and DequantizeLinear with float16 scales, so that it stays float32.

Seen with ONNX Runtime 1.31.1, from ORT_ENABLE_BASIC on, whatever the provider; in float32 both are sound.

- It computes a Concat of dequantized tensors whose result is quantized on the integers, with QLinearConcat. That takes scales
  in float32 alone, and the model cannot be opened.
- It quantizes the bias of a Conv, ConvTranspose or Gemm between quantized tensors, with the product of both scales as the
  scale. In float16 that product is subnormal or 0, or the quotient overflows, and the layer adds another bias.

And what float16 itself breaks: a scale below 2**-14, as that of a bias often is, keeps few of its digits, which all that it
scales shares.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir

from export.onnx_fp16.graph_walk import all_nodes, constant_of
from export.onnx_fp16.planning.op_sets import MOVERS
from export.weight_ledger import FP16_MAX, FP16_SMALLEST_NORMAL

CONCAT_REASON = "between quantized tensors: ONNX Runtime joins those as integers, with scales in float32 alone"
BIAS_REASON = "ONNX Runtime quantizes the layer's bias with the product of both scales, which float16 cannot hold"
SCALE_REASON = "its scale of {:.3g} keeps few digits in float16"

_QUANTIZES, _DEQUANTIZES = "QuantizeLinear", "DequantizeLinear"
_DOMAINS = ("", "com.microsoft")
# It moves quantization past these, or drops them.
_PASSED = (MOVERS | {"MaxPool"}) - {"Concat"}
_BIASED = frozenset({"Conv", "ConvTranspose", "Gemm"})
_ACTIVATIONS = frozenset({"Clip", "Relu"})


def quantized_gaps(model: onnx_ir.Model) -> Iterator[tuple[onnx_ir.Node, str]]:
    """The nodes that ONNX Runtime needs in float32 for this, each with the reason."""
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
    """The Concat with all from the DequantizeLinear before each input to the QuantizeLinear behind it; empty if one lacks."""
    ways = [_from_dequantizer(value) for value in concat.inputs]
    behind = _to_quantizer(concat, _PASSED)
    if not behind or not all(ways):
        return []
    return [*(node for way in ways for node in way), concat, *behind]


def _quantized_bias(layer: onnx_ir.Node) -> onnx_ir.Node | None:
    """The DequantizeLinear of a layer's weights, if the runtime quantizes the bias and float16 cannot hold what comes out."""
    data, weights = (_from_dequantizer(value) for value in layer.inputs[:2])
    bias = constant_of(layer.inputs[2])
    if not data or not weights or bias is None or not _to_quantizer(layer, _PASSED | _ACTIVATIONS):
        return None
    product = _smallest_scale(data[-1]) * _smallest_scale(weights[-1])
    largest = float(np.abs(bias.numpy()).max(initial=0.0))
    return weights[-1] if product < FP16_SMALLEST_NORMAL or largest > FP16_MAX * product else None


def _smallest_scale(dequantizer: onnx_ir.Node) -> float:
    """Of those that are not 0; 0 where it is no constant, as it might be."""
    scale = constant_of(dequantizer.inputs[1])
    if scale is None:
        return 0.0
    sizes = np.abs(scale.numpy())
    return float(sizes.min(initial=np.inf, where=sizes > 0))


def _from_dequantizer(value: onnx_ir.Value | None) -> list[onnx_ir.Node]:
    """The nodes back to a DequantizeLinear, which comes last; empty where a value comes from elsewhere."""
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
    """The nodes behind one up to a QuantizeLinear, if nobody else reads them; empty where there is none."""
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
