"""Operators whose constants runtimes store in the node's half-precision type, as the steps that round there.

OpenVINO turns float attributes into tensors of the node's type, and ONNX Runtime's CUDA kernels cast them: HardSigmoid,
LeakyRelu, Selu and ThresholdedRelu round their attributes. Selu's 1.6733 is 1.6719 in bfloat16.

In bfloat16 models, which OpenVINO computes on CPUs, a step with a rounded constant precedes the result; float16 models are
simulated as CUDA computes them, which has no such step.

- Gemm multiplies its second matrix by `alpha`, and its bias by `beta`, before the product.
- Mean multiplies the sum by the rounded reciprocal of the number of its inputs.
- Div by a constant multiplies by the constant's rounded reciprocal.

Without these steps the error was up to 3.6 times the predicted one on a processor with AVX512-BF16
(`python -m benchmarks.half_hardware` shows the ratio for whole models).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import ArrayLike
from onnx import TensorProto, defs, numpy_helper

from halfserve.export.half_types import BF16, HalfType
from halfserve.export.verification.cuda_kernels import NodeSteps

ATTRIBUTES = {
    "HardSigmoid": ("alpha", "beta"),
    "LeakyRelu": ("alpha",),
    "Selu": ("alpha", "gamma"),
    "ThresholdedRelu": ("alpha",),
}
BROADCASTS_FROM = 7  # the opset since which Mul broadcasts its operands


@dataclass(frozen=True, kw_only=True)
class StoredConstants:
    """The constants of one graph.

    Attributes:
        half: The half-precision type of the nodes.
        opset: The opset version of ONNX's own operators.
        tensors: Weights and constants that the graph sees, by name.
    """

    half: HalfType
    opset: int
    tensors: Mapping[str, TensorProto]

    def steps(self, node: onnx.NodeProto, numbers: Iterator[int]) -> list[onnx.NodeProto]:
        """The steps of a half-precision node whose constants round; [] for any other node.

        Args:
            node: A node of the half type.
            numbers: Yields unique numbers for the names of inner values.
        """
        if node.domain not in ("", "ai.onnx"):
            return []
        if node.op_type in ATTRIBUTES:
            return [self._with_rounded_attributes(node)]
        build = _BUILDERS.get(node.op_type)
        if build is None or self.half is not BF16 or self.opset < BROADCASTS_FROM:
            return []
        steps = NodeSteps(node, self.opset, f"{node.output[0]}/step_{next(numbers)}")
        build(self, steps)
        steps.finish(named=True)
        return steps.nodes

    def _with_rounded_attributes(self, node: onnx.NodeProto) -> onnx.NodeProto:
        rounded = onnx.NodeProto()
        rounded.CopyFrom(node)
        given = {attribute.name: attribute for attribute in rounded.attribute}
        schema = defs.get_schema(node.op_type, self.opset, "")
        for name in ATTRIBUTES[node.op_type]:
            attribute = given.get(name)
            if attribute is None:
                attribute = rounded.attribute.add()
                attribute.CopyFrom(schema.attributes[name].default_value)
            attribute.f = float(self.half.rounded(np.array(attribute.f, np.float32)))
        return rounded


def tensors_in(graph: onnx.GraphProto) -> Iterator[tuple[str, TensorProto]]:
    """Names and tensors of a graph's weights and Constant nodes, bodies left out."""
    for tensor in graph.initializer:
        yield tensor.name, tensor
    for node in graph.node:
        for attribute in node.attribute if node.op_type == "Constant" else ():
            if attribute.name == "value":
                yield node.output[0], attribute.t


def _gemm(constants: StoredConstants, steps: NodeSteps) -> None:
    alpha, beta = (float(steps.attributes.get(name, 1.0)) for name in ("alpha", "beta"))
    first, second, *bias = steps.node.input
    if alpha == beta == 1.0:
        return
    if alpha != 1.0:
        second = _times(constants.half, steps, second, alpha)
    if beta != 1.0 and bias and bias[0]:
        bias = [_times(constants.half, steps, bias[0], beta)]
    kept = {name: value for name, value in steps.attributes.items() if name.startswith("trans")}
    steps.add("Gemm", first, second, *bias, **kept)


def _mean(constants: StoredConstants, steps: NodeSteps) -> None:
    total, *addends = steps.node.input
    for addend in addends:
        total = steps.add("Add", total, addend)
    _times(constants.half, steps, total, 1 / (1 + len(addends)))


def _div(constants: StoredConstants, steps: NodeSteps) -> None:
    dividend, divisor = steps.node.input
    tensor = constants.tensors.get(divisor)
    if tensor is None or tensor.data_type != constants.half.elem_type or tensor.data_location == TensorProto.EXTERNAL:
        return
    with np.errstate(divide="ignore"):
        reciprocal = np.asarray(1 / numpy_helper.to_array(tensor).astype(np.float32), np.float32)
    if np.isfinite(reciprocal).all():
        _times(constants.half, steps, dividend, reciprocal)


def _times(half: HalfType, steps: NodeSteps, value: str, factor: ArrayLike) -> str:
    """Multiply by numbers that are rounded to the half type."""
    stored = numpy_helper.from_array(half.rounded(np.asarray(factor, np.float32)), "value")
    return steps.add("Mul", value, steps.add("Constant", value=stored))


_BUILDERS: dict[str, Callable[[StoredConstants, NodeSteps], None]] = {"Div": _div, "Gemm": _gemm, "Mean": _mean}
