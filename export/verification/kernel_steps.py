"""Operators that runtimes compute in several steps, each of which rounds to the node's half-precision type.

CUDA kernels of ONNX Runtime that round to float16 inside:

- `ReduceKernel` (core/providers/cuda/reduction/reduction_ops.cc) sums in float32, but keeps intermediate values in buffers of
  the tensor's type. ReduceSumSquare squares into a float16 buffer, where 300 overflows. ReduceLogSum rounds its sum before
  the logarithm, which fails for 70000. ReduceLogSumExp does so too, after the largest value was subtracted and the
  exponentials rounded. ReduceL2, ReduceMean, ReduceSum and ReduceL1 are one cuDNN call with float32 inside.
- CumSum (core/providers/cuda/math/cumsum_impl.cu) adds in the tensor's type: 4096 ones add up to 2048, above which float16
  has no odd numbers. A Scan reproduces it, since a runtime cannot merge its iterations. In reverse the kernel starts each sum
  at its own place and the Scan at the end of the axis: as many roundings in another order.
- Sum (core/providers/cuda/math/variadic_elementwise_ops.cc) adds inputs one by one in the tensor's type: 6e4 + 6e4 - 6e4 is
  infinite.
- Einsum (core/providers/cpu/math/einsum_utils, for both providers) first sums each operand over its own labels, then
  multiplies operands pairwise, with float16 tensors in between.

Constants that runtimes store in the node's type:

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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import ArrayLike
from onnx import TensorProto, defs, helper, numpy_helper

from halfserve.export.half_types import BF16, HalfType

AXES_ARE_INPUT_FROM = {"ReduceSum": 13, "ReduceMax": 18}
RAISED = "/as_float32_"  # in the name of a half value that was cast to float32 for a node to compute on
ENDLESS = 2**63 - 1  # Slice's "to the end"
ATTRIBUTES = {
    "HardSigmoid": ("alpha", "beta"),
    "LeakyRelu": ("alpha",),
    "Selu": ("alpha", "gamma"),
    "ThresholdedRelu": ("alpha",),
}
BROADCASTS_FROM = 7  # the opset since which Mul broadcasts its operands


def kernel_steps(node: onnx.NodeProto, opset: int, numbers: Iterator[int]) -> list[onnx.NodeProto]:
    """Return the steps of a float16 reduction, Sum or Einsum whose kernel rounds inside; any other node itself.

    `numbers` yields unique numbers for the names of inner values.
    """
    decompose = _DECOMPOSED.get(node.op_type) if node.domain in ("", "ai.onnx") else None
    if decompose is None:
        return [node]
    steps = NodeSteps(node, opset, f"{node.output[0]}/step_{next(numbers)}")
    decompose(steps)
    return steps.nodes if len(steps.nodes) > 1 else [node]


class NodeSteps:
    """Collects nodes that replace or accompany one node, with its metadata, under unique names."""

    def __init__(self, node: onnx.NodeProto, opset: int, prefix: str) -> None:
        self.node, self.opset = node, opset
        self.nodes: list[onnx.NodeProto] = []
        self.attributes: dict[str, Any] = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
        self._prefix = prefix

    def add(self, operation: str, *inputs: str, **attributes: Any) -> str:
        name = f"{self._prefix}/{len(self.nodes)}"
        made = helper.make_node(operation, inputs, [name], name=name, **attributes)
        made.metadata_props.extend(self.node.metadata_props)
        self.nodes.append(made)
        return name

    def constant(self, values: Sequence[float], elem_type: int) -> str:
        return self.add("Constant", value=helper.make_tensor("value", elem_type, [len(values)], list(values)))

    def reduce(self, operation: str, x: str, **attributes: Any) -> str:
        """Reduce x over the node's axes, which are an attribute or an input depending on the opset."""
        attributes = {name: value for name, value in self.attributes.items() if name in ("axes", "keepdims")} | attributes
        inputs = [x, *self.node.input[1:]]
        if self.opset >= AXES_ARE_INPUT_FROM[operation] and (axes := attributes.pop("axes", None)) is not None:
            inputs.append(self.constant(axes, TensorProto.INT64))
        return self.add(operation, *inputs, **attributes)

    def finish(self, *, named: bool = False) -> None:
        """Let the last step yield the node's result, and with `named` carry its name too."""
        for number, step in enumerate(self.nodes):
            step.name = f"{self.node.name or self.node.output[0]}/{step.op_type}_{number + 1}"
        if self.nodes:
            self.nodes[-1].output[0] = self.node.output[0]
            self.nodes[-1].name = self.node.name if named else self.nodes[-1].name


def _reduction(build: Callable[[NodeSteps, str], str]) -> Callable[[NodeSteps], None]:
    def decompose(steps: NodeSteps) -> None:
        if not steps.attributes.get("noop_with_empty_axes"):
            build(steps, steps.node.input[0])
            steps.finish()

    return decompose


def _log_sum_exp(steps: NodeSteps, x: str) -> str:
    shifted = steps.add("Sub", x, steps.reduce("ReduceMax", x, keepdims=1))
    total = steps.reduce("ReduceSum", steps.add("Exp", shifted))
    return steps.add("Add", steps.add("Log", total), steps.reduce("ReduceMax", x))


def _sum(steps: NodeSteps) -> None:
    total, *addends = steps.node.input
    for addend in addends:
        total = steps.add("Add", total, addend)
    steps.finish(named=True)


def _einsum(steps: NodeSteps) -> None:
    """Sum each operand over its own labels, then multiply pairwise; a label ends where no later operand or result has it."""
    equation = steps.attributes["equation"].decode().replace(" ", "")
    if "." in equation:
        return
    left, _, right = equation.partition("->")
    terms = left.split(",")
    result = right if "->" in equation else "".join(sorted(label for label in set(left) - {","} if left.count(label) == 1))
    operands: list[tuple[str, str]] = []
    for index, (name, term) in enumerate(zip(steps.node.input, terms, strict=True)):
        kept = _kept(term, [*terms[:index], *terms[index + 1 :], result]) if len(terms) > 1 else term
        operands.append(
            (name, term) if set(kept) == set(term) else (steps.add("Einsum", name, equation=f"{term}->{kept}"), kept)
        )
    (product, labels), *rest = operands
    for index, (name, term) in enumerate(rest, 1):
        last = index == len(rest)
        kept = result if last else _kept(labels + term, [*(term for _, term in rest[index:]), result])
        product, labels = steps.add("Einsum", product, name, equation=f"{labels},{term}->{kept}"), kept
    steps.finish(named=True)


def _kept(labels: str, others: Sequence[str]) -> str:
    return "".join(label for label in dict.fromkeys(labels) if any(label in other for other in others))


_DECOMPOSED: dict[str, Callable[[NodeSteps], None]] = {
    "ReduceSumSquare": _reduction(lambda steps, x: steps.reduce("ReduceSum", steps.add("Mul", x, x))),
    "ReduceLogSum": _reduction(lambda steps, x: steps.add("Log", steps.reduce("ReduceSum", x))),
    "ReduceLogSumExp": _reduction(_log_sum_exp),
    "Sum": _sum,
    "Einsum": _einsum,
}


def constants_in(graph: onnx.GraphProto) -> dict[str, int]:
    """Integers in a graph's initializers and Constant nodes of one element, by name."""
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    found: dict[str, int] = {}
    for node in graph.node:
        for attribute in node.attribute if node.op_type == "Constant" else ():
            if attribute.name == "value":
                tensors[node.output[0]] = attribute.t
            elif attribute.name == "value_int":
                found[node.output[0]] = attribute.i
    for name, tensor in tensors.items():
        if tensor.data_type in (TensorProto.INT32, TensorProto.INT64) and list(tensor.dims) in ([], [1]):
            found[name] = int(numpy_helper.to_array(tensor).reshape(()))
    return found


def is_cumsum(node: onnx.NodeProto, constants: Mapping[str, int]) -> bool:
    """Return whether a node is a CumSum over a constant axis; any other CumSum is not decomposed."""
    return node.op_type == "CumSum" and node.domain in ("", "ai.onnx") and node.input[1] in constants


def cumsum_steps(node: onnx.NodeProto, constants: Mapping[str, int], half: int = TensorProto.FLOAT16) -> list[onnx.NodeProto]:
    """Return the steps of a CumSum of type `half` (opset 14 or later) over a constant axis; its result keeps its name."""
    x, y, axis = node.input[0], node.output[0], constants[node.input[1]]
    flags = {attribute.name: bool(attribute.i) for attribute in node.attribute}
    exclusive, backwards = flags.get("exclusive", False), flags.get("reverse", False)
    part = f"{y}/running"
    zero = helper.make_tensor("value", half, [1], [0.0])
    scan = helper.make_node(
        "Scan",
        [f"{part}/start", f"{part}/longer"],
        [f"{part}/end", f"{part}/sums"],
        name=node.name,
        body=_turn(part, half),
        num_scan_inputs=1,
        scan_input_axes=[axis],
        scan_input_directions=[int(backwards)],
        scan_output_axes=[axis],
        scan_output_directions=[int(backwards)],
    )
    scan.metadata_props.extend(node.metadata_props)
    # A leading zero prevents a Scan over an empty axis, which crashes ONNX Runtime.
    longer = [x, f"{part}/zeros"] if backwards else [f"{part}/zeros", x]
    first, last = (1, ENDLESS) if exclusive == backwards else (0, -1)
    return [
        *(_whole(f"{part}/{name}", number) for name, number in (("axes", axis), ("first", first), ("last", last))),
        helper.make_node("ReduceSum", [x, f"{part}/axes"], [f"{part}/one"], keepdims=1),  # only its shape is used
        helper.make_node("Shape", [f"{part}/one"], [f"{part}/shape"]),
        helper.make_node("ConstantOfShape", [f"{part}/shape"], [f"{part}/zeros"], value=zero),
        helper.make_node("Squeeze", [f"{part}/zeros", f"{part}/axes"], [f"{part}/start"]),
        helper.make_node("Concat", longer, [f"{part}/longer"], axis=axis),
        scan,
        helper.make_node("Slice", [f"{part}/{name}" for name in ("sums", "first", "last", "axes")], [y]),
    ]


def _whole(name: str, number: int) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=helper.make_tensor("value", TensorProto.INT64, [1], [number]))


def _turn(part: str, half: int) -> onnx.GraphProto:
    """Return the Scan's body: one addition in float32, rounded to the half type."""
    total, entry, added, after, seen = (f"{part}/{name}" for name in ("total", "entry", "added", "after", "seen"))
    wide, more = f"{total}{RAISED}", f"{entry}{RAISED}"
    nodes = [
        helper.make_node("Cast", [total], [wide], to=TensorProto.FLOAT),
        helper.make_node("Cast", [entry], [more], to=TensorProto.FLOAT),
        helper.make_node("Add", [wide, more], [added]),
        helper.make_node("Cast", [added], [after], to=half),
        helper.make_node("Identity", [after], [seen]),
    ]
    values = [helper.make_tensor_value_info(name, half, None) for name in (total, entry, after, seen)]
    return helper.make_graph(nodes, "running_sum", values[:2], values[2:])


@dataclass(frozen=True, kw_only=True)
class StoredConstants:
    """The weights and constants that one graph sees, by name, and the half type of its nodes."""

    half: HalfType
    opset: int
    tensors: Mapping[str, TensorProto]

    def steps(self, node: onnx.NodeProto, numbers: Iterator[int]) -> list[onnx.NodeProto]:
        """Return the steps of a half-precision node whose constants round; [] for any other node. See `kernel_steps` for
        `numbers`.
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
    """Yield names and tensors of a graph's weights and Constant nodes, bodies left out."""
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
