"""Roundings inside ONNX Runtime's CUDA kernels, beside `verification.kernel_steps`: activations and TF32 products.

Activations (core/providers/cuda/activation/activations_impl.cu, contrib_ops/cuda/activation and contrib_ops/cuda/bert) are
written for the node's type, so that each operation of their formula rounds to the half type. Sigmoid below 0 is
1 - 1 / (1 + exp(x)), and Softplus is log(exp(x) + 1): both lose what rounding takes from a number near 1. ONNX Runtime fuses
x * Sigmoid(x) to QuickGelu when it opens a model, whose kernel has the same steps as Sigmoid and the product. Mish and Swish
have no kernel, and their definitions by smaller operators take their place. Tanh, Erf and the exact Gelu are computed in
float32, as are norms and Softmax: these round once, like every node of the simulation. Gelu's tanh approximation rounds at
each step.

Attention (core/providers/cuda/llm/attention.cc) has several kernels, chosen by shapes and the device. The one of separate
products keeps scores and probabilities in the node's type; the others keep more digits. The operators that define Attention
take its place, which round the scaled query and key besides.

Products of float32 nodes are TF32: their operands are rounded to 11 significant bits, and the sums are float32. Halfserve's
server turns this off (`use_tf32=0`) for a file without a convolution in half precision (see `halfserve.files.cuda_products`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, defs, helper, inliner

from halfserve.export.half_types import HalfType
from halfserve.export.onnx_files.proto_graphs import all_graphs, all_nodes
from halfserve.export.verification.kernel_steps import NodeSteps

STEP = "/cuda_step_"  # in the names of values inside a kernel
_ONNX = ("", "ai.onnx")
FIRST_OPSET = 9  # first opset that has Where
# The inputs of float32 products that TF32 rounds; a bias is added in float32.
TF32_INPUTS: Mapping[str, int] = {
    **dict.fromkeys(("Conv", "ConvTranspose", "Gemm", "MatMul"), 2),
    **dict.fromkeys(("Attention", "GRU", "LSTM", "RNN"), 3),
    "Einsum": 1 << 30,
}
GELU_SCALE, GELU_CUBIC = math.sqrt(2 / math.pi), 0.044715  # constants of the tanh approximation
SPLITTER = 2.0**13 + 1  # Dekker's: splits off the upper 11 of float32's 24 bits
LARGEST_SPLIT = 2.0**100  # larger numbers would overflow in between, and stay as they are


def attention_in_parts(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with the operators that define Attention in its place; the model itself where there is none."""
    if not any(node.op_type == "Attention" and node.domain in _ONNX for node in all_nodes(model)):
        return model
    known = {name for graph in all_graphs(model) for node in graph.node for name in node.output}
    try:
        parts = inliner.inline_selected_functions(model, [("", "Attention")], inline_schema_functions=True)
    except RuntimeError:  # an input in the middle is absent: Attention rounds once
        return model
    made = {name for graph in all_graphs(parts) for node in graph.node for name in node.output} - known
    for node in all_nodes(parts):
        for names in (node.input, node.output):
            names[:] = [f"{name}{STEP}attention" if name in made else name for name in names]
    return parts


@dataclass(frozen=True, kw_only=True)
class CudaKernels:
    """The steps of kernels in one graph.

    Attributes:
        half: The half type of the graph's nodes.
        opset: The opset version of ONNX's own operators.
        has_tf32: Whether float32 products are TF32.
    """

    half: HalfType
    opset: int
    has_tf32: bool

    def steps(self, node: onnx.NodeProto, numbers: Iterator[int]) -> list[onnx.NodeProto]:
        """Return the steps of a half-precision activation; [] for any other node. `numbers` is that of `kernel_steps`."""
        build = _ACTIVATIONS.get(node.op_type) if node.domain in (*_ONNX, "com.microsoft") else None
        if build is None or self.opset < FIRST_OPSET:
            return []
        steps = _Steps(node, self.opset, f"{node.output[0]}{STEP}{next(numbers)}", self.half)
        build(steps)
        steps.finish(named=True)
        return steps.nodes

    def products(self, node: onnx.NodeProto, is_float32: Callable[[str], bool], numbers: Iterator[int]) -> list[onnx.NodeProto]:
        """Return a float32 product behind the steps that round its operands to TF32; any other node itself."""
        if not self.has_tf32 or self.opset < FIRST_OPSET or node.domain not in _ONNX or node.op_type not in TF32_INPUTS:
            return [node]
        narrow = onnx.NodeProto()
        narrow.CopyFrom(node)
        nodes: list[onnx.NodeProto] = []
        for index, name in enumerate(node.input[: TF32_INPUTS[node.op_type]]):
            if name and is_float32(name):
                steps = _Steps(node, self.opset, f"{node.output[0]}{STEP}{next(numbers)}", self.half)
                narrow.input[index] = steps.tf32(name)
                steps.finish_beside()
                nodes += steps.nodes
        return [*nodes, narrow]


class _Steps(NodeSteps):
    """Steps with scalar constants: float32 numbers that the half type holds, so that a step's other operand gives its type."""

    def __init__(self, node: onnx.NodeProto, opset: int, prefix: str, half: HalfType) -> None:
        super().__init__(node, opset, prefix)
        self._half = half
        self.x = node.input[0]

    def number(self, value: float) -> str:
        """Return a constant, rounded to the half type as kernels cast it."""
        return self._float32(float(self._half.rounded(np.array(value, np.float32))))

    def attribute(self, name: str) -> str:
        """Return the number of an attribute, or its default."""
        value = self.attributes.get(name)
        if value is None and not self.node.domain.startswith("com."):
            schema = defs.get_schema(self.node.op_type, self.opset, "")
            value = helper.get_attribute_value(schema.attributes[name].default_value)
        return self.number(1.702 if value is None else value)  # QuickGelu's default

    def decay(self) -> str:
        """exp(-|x|), which no argument overflows."""
        return self.add("Exp", self.add("Neg", self.add("Abs", self.x)))

    def above_zero(self, chosen: str, other: str, x: str) -> str:
        """`chosen` where x is above 0, else `other`."""
        return self.add("Where", self.add("Greater", x, self.number(0)), chosen, other)

    def sigmoid(self, x: str) -> str:
        one = self.number(1)
        power = self.add("Exp", self.add("Neg", self.add("Abs", x)))
        share = self.add("Div", one, self.add("Add", power, one))
        return self.above_zero(share, self.add("Sub", one, share), x)

    def softplus(self) -> str:
        logarithm = self.add("Log", self.add("Add", self.decay(), self.number(1)))
        return self.above_zero(self.add("Add", self.x, logarithm), logarithm, self.x)

    def elu(self, alpha: str) -> str:
        """Alpha times exp(x) - 1, for x below 0."""
        return self.add("Mul", self.add("Sub", self.add("Exp", self.x), self.number(1)), alpha)

    def hard_sigmoid(self, alpha: str, beta: str) -> str:
        line = self.add("Add", self.add("Mul", self.x, alpha), beta)
        return self.add("Max", self.add("Min", line, self.number(1)), self.number(0))

    def tf32(self, name: str) -> str:
        """Return a float32 value rounded to 11 significant bits by Dekker's splitting."""
        wide = self.add("Mul", name, self._float32(SPLITTER))
        upper = self.add("Sub", wide, self.add("Sub", wide, name))
        return self.add("Where", self.add("Less", self.add("Abs", name), self._float32(LARGEST_SPLIT)), upper, name)

    def finish_beside(self) -> None:
        """Name the steps after the node, whose own result stays."""
        for step in self.nodes:
            step.name = step.output[0]

    def _float32(self, value: float) -> str:
        return self.add("Constant", value=helper.make_tensor("value", TensorProto.FLOAT, [], [value]))


def _sigmoid(steps: _Steps) -> None:
    steps.sigmoid(steps.x)


def _swish(steps: _Steps) -> None:
    scale = steps.attribute("alpha")
    steps.add("Mul", steps.x, steps.sigmoid(steps.add("Mul", steps.x, scale)))


def _softplus(steps: _Steps) -> None:
    steps.softplus()


def _mish(steps: _Steps) -> None:
    steps.add("Mul", steps.x, steps.add("Tanh", steps.softplus()))


def _softsign(steps: _Steps) -> None:
    steps.add("Div", steps.x, steps.add("Add", steps.add("Abs", steps.x), steps.number(1)))


def _elu(steps: _Steps) -> None:
    steps.above_zero(steps.x, steps.elu(steps.attribute("alpha")), steps.x)


def _selu(steps: _Steps) -> None:
    part = steps.above_zero(steps.x, steps.elu(steps.attribute("alpha")), steps.x)
    steps.add("Mul", part, steps.attribute("gamma"))


def _hard_sigmoid(steps: _Steps) -> None:
    steps.hard_sigmoid(steps.attribute("alpha"), steps.attribute("beta"))


def _hard_swish(steps: _Steps) -> None:
    steps.add("Mul", steps.x, steps.hard_sigmoid(steps.number(1 / 6), steps.number(0.5)))


def _tanh_gelu(steps: _Steps) -> None:
    if steps.node.op_type == "Gelu" and steps.attributes.get("approximate") != b"tanh":
        return
    x = steps.add("Add", *steps.node.input[:2]) if len(steps.node.input) > 1 and steps.node.input[1] else steps.x
    half, scale, cubic = (steps.number(value) for value in (0.5, GELU_SCALE, GELU_SCALE * GELU_CUBIC))
    inner = steps.add("Add", steps.add("Mul", steps.add("Mul", x, cubic), x), scale)
    share = steps.add("Add", steps.add("Mul", steps.add("Tanh", steps.add("Mul", x, inner)), half), half)
    steps.add("Mul", x, share)


_ACTIVATIONS: dict[str, Callable[[_Steps], None]] = {
    "Sigmoid": _sigmoid,
    "Swish": _swish,
    "QuickGelu": _swish,
    "Softplus": _softplus,
    "Mish": _mish,
    "Softsign": _softsign,
    "Elu": _elu,
    "Selu": _selu,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _hard_swish,
    "Gelu": _tanh_gelu,
    "FastGelu": _tanh_gelu,
}
