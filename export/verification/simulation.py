"""Simulate what half-precision hardware computes: rewrite a model so that every node rounds its result.

On most CPUs ONNX Runtime has no float16 arithmetic. It casts a chain of nodes to float32 and drops the casts in between, at
every optimisation level: `1 * 300 * 300 / 300` yields 300 there, and infinity on a GPU, whose every node rounds. Casts that
the model itself contains are never dropped, so the rewritten model raises each node's half inputs to float32 and rounds its
results. Nodes without a half result, such as ArgMax, take rounded inputs too: a Cast to a half type is rounding. A bfloat16
model is held in float32 besides (see `onnx_fp16.float32_copy`), as the CPU provider has hardly any kernels for it.

Sums inside a node stay float32, as in ONNX Runtime's CUDA kernels and in processors with bfloat16 instructions: cuBLAS and
cuDNN use float32 as compute type, and softmax and norms accumulate in float32. A few operators round inside and are decomposed,
and constants of others are rounded (see `verification.kernel_steps` for both). The simulation of CUDA decomposes activations
and rounds operands of float32 products besides (see `verification.cuda_steps`).

A runtime that sums in float16, as TensorRT may in strongly typed networks, can overflow inside a node whose result fits: a
mean of 300 squares may be 4e4 while their sum is 1.2e7. Sum checks add an output for each such node: the sum of magnitudes
(or squares) of its terms, an upper bound of every partial sum in every order. Norms, reductions and pools are cheap to check;
matrix products and convolutions cost as much again as the model. Softmax needs no check: after subtraction of the largest
value its sum is at most the length of the axis. Attention and recurrent layers, and nodes in bodies of If, Loop and Scan,
cannot be checked and are listed instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

import onnx
from onnx import TensorProto, helper, inliner, shape_inference

from halfserve.export.certificate.verdicts import Risk
from halfserve.export.export_errors import ExportError
from halfserve.export.half_types import BF16, FP16, FP16_MAX, HalfType
from halfserve.export.onnx_files.model_file import format_opset
from halfserve.export.onnx_files.proto_graphs import bodies
from halfserve.export.onnx_fp16.element_types import Signature, signature_named
from halfserve.export.onnx_fp16.float32_copy import hold_in_float32
from halfserve.export.onnx_fp16.graph import TYPE_ATTRIBUTES
from halfserve.export.verification.cuda_steps import STEP, CudaKernels, attention_in_parts
from halfserve.export.verification.kernel_steps import (
    AXES_ARE_INPUT_FROM,
    RAISED,
    NodeSteps,
    StoredConstants,
    constants_in,
    cumsum_steps,
    is_cumsum,
    kernel_steps,
    tensors_in,
)
from halfserve.files.cuda_products import has_half_convolution

# Operators that move or convert values and cannot round.
_MOVERS = """
    Cast CastLike Compress ConcatFromSequence Concat Constant ConstantOfShape DepthToSpace Expand Flatten Gather GatherElements
    GatherND Identity NonZero Optional OptionalGetElement OptionalHasElement Pad Reshape ReverseSequence Shape Size Slice
    SpaceToDepth Split SplitToSequence SequenceAt SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceLength
    Squeeze Tile Transpose Unsqueeze
"""
MOVERS = frozenset(_MOVERS.split())
# Movers without a float16 kernel in ONNX Runtime's CPU provider, which casts their inputs to float32 itself. That cast cancels
# a Cast to float16 before it, and the value would not be rounded at all.
_RAISED_MOVERS = frozenset({"NonZero", "Pad", "Tile"})
BEFORE_ROUNDING = "/before_rounding"
FLOAT_TYPE_NAMES: dict[int, str] = {
    TensorProto.FLOAT16: "tensor(float16)",
    TensorProto.FLOAT: "tensor(float)",
    TensorProto.DOUBLE: "tensor(double)",
    TensorProto.BFLOAT16: "tensor(bfloat16)",
}
PREFIX = "halfserve/reach/"
PRODUCTS = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "FusedMatMul"})
# Operators that sum inner values which no output shows.
_UNBOUNDED = """
    Attention DecoderMaskedMultiHeadAttention DecoderMaskedSelfAttention DeformConv DFT EmbedLayerNormalization FusedConv
    FusedGemm GemmFastGelu GlobalLpPool GroupNorm GroupQueryAttention GRU LpPool LRN LSTM MatMulBnb4 MatMulNBits
    MeanVarianceNormalization MultiHeadAttention NhwcConv PackedAttention PackedMultiHeadAttention QAttention RNN
    SkipGroupNorm SkipLayerNormalization SkipSimplifiedLayerNormalization SparseAttention STFT TransposeMatMul
"""
UNBOUNDED = frozenset(_UNBOUNDED.split())


def round_every_node(
    model: onnx.ModelProto, half: HalfType = FP16, written: HalfType | None = None, *, cuda: bool = False
) -> onnx.ModelProto:
    """Copy a half-precision model so that its nodes compute in float32 and round each result to `half`.

    Inputs and outputs stay, except where `half` or `written` is bfloat16: there those of a half type become float32, and hold
    numbers of that type. `written` is the type in which the model is written, `half` by default; another one's weights are
    rounded to `half` too. With `cuda`, nodes round inside too where ONNX Runtime's CUDA kernels do.

    Functions are inlined, and bodies of If, Loop and Scan round too. Nodes of other types stay unchanged. Types of values come
    from shape inference, else from value_info, else from operator signatures (see `ElementTypes`).

    Raises:
        ExportError: Functions cannot be inlined, or types are inconsistent.
    """
    written = written or half
    try:
        inlined = inliner.inline_local_functions(model)
        typed = shape_inference.infer_shapes(attention_in_parts(inlined) if cuda else inlined)
    except (shape_inference.InferenceError, ValueError, RuntimeError) as error:
        raise ExportError(f"cannot tell the types of the model's values: {str(error).splitlines()[0]}") from error
    opsets = {entry.domain: entry.version for entry in typed.opset_import}
    types = ElementTypes(opsets, written)
    kernels = None
    if cuda:
        kernels = CudaKernels(half=written, opset=types.opset, has_tf32=has_half_convolution(typed))
    _rewrite(typed.graph, types, {}, {}, count(), kernels)
    if not opsets.keys() & {"", "ai.onnx"}:
        typed.opset_import.append(helper.make_opsetid("", format_opset(typed.ir_version)))  # for the casts
    if BF16 in (half, written):
        hold_in_float32(typed, half, rounded=True, written=written)
    return typed


def simulated_node(node: onnx.NodeProto) -> bool:
    """Return whether a node of a rounded model replaces a half-precision node."""
    return any(name.endswith(BEFORE_ROUNDING) for name in node.output)


def rounds(graph: onnx.GraphProto) -> bool:
    """Return whether a node of a rounded model, bodies included, takes or makes numbers that were rounded to half precision.

    A node without a half result, such as ArgMax or Greater, takes them too. Movers and casts alone need no simulation: every
    runtime executes a Cast that the model contains.
    """
    return any(_takes_rounded(node) or any(map(rounds, bodies(node))) for node in graph.node)


def has_cuda_steps(graph: onnx.GraphProto) -> bool:
    """Return whether a model that was rounded for CUDA differs from one that was not, bodies included."""
    return any(STEP in name for node in graph.node for name in node.output) or any(
        has_cuda_steps(body) for node in graph.node for body in bodies(node)
    )


def _takes_rounded(node: onnx.NodeProto) -> bool:
    return simulated_node(node) or any(RAISED in name for name in node.input)


def _rewrite(
    graph: onnx.GraphProto,
    outer: ElementTypes,
    known: Mapping[str, int],
    seen: Mapping[str, TensorProto],
    numbers: Iterator[int],
    cuda: CudaKernels | None,
) -> None:
    types, constants, tensors = outer.within(graph), {**known, **constants_in(graph)}, {**seen, **dict(tensors_in(graph))}
    stored = StoredConstants(half=types.half, opset=types.opset, tensors=tensors)
    rounder = _Rounder(types, next(numbers))
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        inner = list(bodies(node))
        types.guess(node)
        for body in inner:
            _rewrite(body, types, constants, tensors, numbers, cuda)
        if node.op_type == "CastLike" and types.is_half(node.input[1]):
            nodes.append(helper.make_node("Cast", node.input[:1], node.output, to=types.half.elem_type))
        elif inner or _only_moves(node) or not any(types.is_half(name) for name in node.input):
            nodes += cuda.products(node, types.is_float32, numbers) if cuda is not None else [node]
        elif is_cumsum(node, constants):
            nodes += cumsum_steps(node, constants, types.half.elem_type)
        else:
            steps = cuda.steps(node, numbers) if cuda is not None else []
            for part in steps or stored.steps(node, numbers) or kernel_steps(node, types.opset, numbers):
                types.guess(part)
                nodes += rounder.around(part)
    del graph.node[:]
    graph.node.extend(nodes)
    del graph.value_info[:]


class _Rounder:
    """Puts casts around the nodes of one graph; the scope's number separates names of a graph and its bodies."""

    def __init__(self, types: ElementTypes, scope: int) -> None:
        self._types = types
        self._scope = scope
        self._raised: set[str] = set()

    def around(self, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        """Yield the node in float32 between casts; an input is raised once per graph."""
        wide = onnx.NodeProto()
        wide.CopyFrom(node)
        for index, name in enumerate(node.input):
            if self._types.is_half(name):
                wide.input[index] = f"{name}{RAISED}{self._scope}"
                if name not in self._raised:
                    self._raised.add(name)
                    yield helper.make_node("Cast", [name], [wide.input[index]], to=TensorProto.FLOAT)
        rounded = [(index, name) for index, name in enumerate(node.output) if name and self._types.is_half(name)]
        for index, name in rounded:
            wide.output[index] = f"{name}{BEFORE_ROUNDING}"
        for attribute in wide.attribute if rounded else ():
            if attribute.name in TYPE_ATTRIBUTES and attribute.i == self._types.half.elem_type:
                attribute.i = TensorProto.FLOAT
        yield wide
        for index, name in rounded:
            yield helper.make_node("Cast", [wide.output[index]], [name], to=self._types.half.elem_type)


def _only_moves(node: onnx.NodeProto) -> bool:
    """Return whether a node cannot round, and the runtime computes it on half inputs."""
    return node.op_type in MOVERS - _RAISED_MOVERS


class ElementTypes:
    """Element types of a graph's values, collected while its nodes are visited in order."""

    def __init__(self, opsets: Mapping[str, int], half: HalfType, outer: Mapping[str, int] | None = None) -> None:
        self._opsets, self.half = opsets, half
        self._types = dict(outer or {})

    @property
    def opset(self) -> int:
        """The opset version of ONNX's own operators."""
        return self._opsets.get("", self._opsets.get("ai.onnx", 1))

    def within(self, graph: onnx.GraphProto) -> ElementTypes:
        """Types visible in a body: the outer ones and its own declarations."""
        inner = ElementTypes(self._opsets, self.half, self._types)
        for value in [*graph.input, *graph.output, *graph.value_info]:
            kind = value.type.WhichOneof("value")
            if kind is not None:
                inner._types[value.name] = value.type.tensor_type.elem_type if kind == "tensor_type" else TensorProto.UNDEFINED
        for initializer in graph.initializer:
            inner._types[initializer.name] = initializer.data_type
        return inner

    def guess(self, node: onnx.NodeProto) -> None:
        """Set unknown result types from the operator's signature, else from the node's first floating input."""
        floats = [self._types[name] for name in node.input if self._types.get(name) in FLOAT_TYPE_NAMES]
        signature = signature_named(node.domain, node.op_type, self._opsets)
        bound = {} if signature is None else dict(self._bound(node, signature))
        for index, name in enumerate(node.output):
            if not name or name in self._types:
                continue
            formal = signature.output(index) if signature is not None else None
            kind = bound.get(formal.type_str) if formal is not None else None
            kind = kind or next((kind for kind in floats if formal is None or FLOAT_TYPE_NAMES[kind] in formal.types), None)
            if kind is not None:
                self._types[name] = kind

    def is_half(self, name: str) -> bool:
        return self._types.get(name) == self.half.elem_type

    def is_float32(self, name: str) -> bool:
        return self._types.get(name) == TensorProto.FLOAT

    def _bound(self, node: onnx.NodeProto, signature: Signature) -> Iterator[tuple[str, int]]:
        """Yield the signature's type variables as the node's inputs determine them."""
        for index, name in enumerate(node.input):
            formal = signature.input(index)
            if formal is not None and not (formal.variadic and not formal.homogeneous) and self._types.get(name):
                yield formal.type_str, self._types[name]


@dataclass(frozen=True, kw_only=True)
class SumChecks:
    """A rounded model with additional outputs that bound its sums.

    Attributes:
        model: The model; the added outputs, float32 scalars, follow its own.
        risks: The risk of each added output, with a `reach` of 0.
        unchecked: Nodes that sum inside and were not checked, each as operator and name.
    """

    model: onnx.ModelProto
    risks: tuple[Risk, ...]
    unchecked: tuple[str, ...] = ()

    def without_checks(self, rounded: onnx.ModelProto) -> SumChecks:
        """Return the rounded model without checks."""
        named = tuple(f"{risk.op_type} {risk.node!r}" for risk in self.risks)
        return SumChecks(model=rounded, risks=(), unchecked=(*named, *self.unchecked))

    def over(self, reaches: Sequence[float]) -> list[Risk]:
        """Risks whose bound, the largest value of the added output, exceeds float16's range; largest first."""
        measured = (replace(risk, reach=float(reach)) for risk, reach in zip(self.risks, reaches, strict=True))
        return sorted((risk for risk in measured if risk.reach > FP16_MAX), key=lambda risk: -risk.reach)


def with_sum_checks(rounded: onnx.ModelProto, *, products: bool) -> SumChecks:
    """Add sum checks to a copy of a model from `round_every_node`, with `products` to matrix products and convolutions too."""
    model = onnx.ModelProto()
    model.CopyFrom(rounded)
    opset = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    nodes: list[onnx.NodeProto] = []
    risks: list[Risk] = []
    for node in rounded.graph.node:
        nodes.append(node)
        check = _check_of(node, products=products)
        if check is None or not simulated_node(node):
            continue
        what, sums = check
        steps, result = NodeSteps(node, opset, f"{PREFIX}{len(risks)}"), f"{PREFIX}{len(risks)}"
        bounds = sums(steps)
        nodes += [*steps.nodes, helper.make_node("ReduceMax", [bounds], [result], keepdims=0)]
        model.graph.output.append(helper.make_tensor_value_info(result, TensorProto.FLOAT, []))
        module = next((entry.value for entry in node.metadata_props if entry.key == "halfserve.module"), None)
        risks.append(Risk(node=_name(node), op_type=node.op_type, what=what, reach=0.0, module=module))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return SumChecks(model=model, risks=tuple(risks), unchecked=tuple(_unchecked(rounded.graph, products=products)))


def _unchecked(graph: onnx.GraphProto, *, products: bool) -> Iterator[str]:
    for node in graph.node:
        if simulated_node(node) and node.op_type in UNBOUNDED:
            yield f"{node.op_type} {_name(node)!r}"
        for body in bodies(node):
            yield from _unchecked(body, products=products)
            for inner in body.node:
                if simulated_node(inner) and _check_of(inner, products=products) is not None:
                    yield f"{inner.op_type} {_name(inner)!r}"


def _name(node: onnx.NodeProto) -> str:
    return node.name or node.output[0].removesuffix(BEFORE_ROUNDING)


Sums = Callable[[NodeSteps], str]


def _check_of(node: onnx.NodeProto, *, products: bool) -> tuple[str, Sums] | None:
    if node.op_type in PRODUCTS and not products:
        return None
    return CHECKS.get(node.op_type) if node.domain in ("", "ai.onnx", "com.microsoft") else None


def _magnitudes(steps: NodeSteps) -> str:
    return steps.add(steps.node.op_type, steps.add("Abs", steps.node.input[0]), *steps.node.input[1:], **steps.attributes)


def _mean(steps: NodeSteps) -> str:
    magnitudes = steps.add("Abs", steps.node.input[0])
    means = steps.add(steps.node.op_type, magnitudes, *steps.node.input[1:], **steps.attributes)
    return _total(steps, means, magnitudes)


def _total(steps: NodeSteps, means: str, terms: str) -> str:
    """Multiply means by size(terms) / size(means)."""
    sizes = [steps.add("Cast", steps.add("Size", value), to=TensorProto.FLOAT) for value in (terms, means)]
    return steps.add("Mul", means, steps.add("Div", *sizes))


def _pool(steps: NodeSteps) -> str:
    means = steps.add("AveragePool", steps.add("Abs", steps.node.input[0]), **steps.attributes)
    return steps.add("Mul", means, steps.constant([float(math.prod(steps.attributes["kernel_shape"]))], TensorProto.FLOAT))


def _products(steps: NodeSteps) -> str:
    """Return the product of magnitudes, without the bias."""
    inputs = steps.node.input if steps.node.op_type == "Einsum" else steps.node.input[:2]
    factors = [steps.add("Abs", name) for name in inputs]
    if steps.node.op_type == "Gemm" and steps.opset < 11:  # the bias is mandatory
        factors.append(steps.constant([0.0], TensorProto.FLOAT))
    attributes = {name: abs(value) if name == "alpha" else value for name, value in steps.attributes.items() if name != "beta"}
    return steps.add(steps.node.op_type, *factors, domain=steps.node.domain, **attributes)


def _square(steps: NodeSteps) -> str:
    return steps.add("Mul", steps.node.input[0], steps.node.input[0])


def _reduced_squares(steps: NodeSteps) -> str:
    return steps.reduce("ReduceSum", _square(steps), **steps.attributes)


def _sum_over(steps: NodeSteps, x: str, axes: Sequence[int]) -> str:
    if steps.opset < AXES_ARE_INPUT_FROM["ReduceSum"]:
        return steps.add("ReduceSum", x, axes=list(axes))
    return steps.add("ReduceSum", x, steps.constant(axes, TensorProto.INT64))


def _normalized_squares(steps: NodeSteps) -> str:
    axis = int(steps.attributes.get("axis", -1))
    if axis < 0:
        return _sum_over(steps, _square(steps), range(axis, 0))
    return _sum_over(steps, steps.add("Flatten", _square(steps), axis=axis), [1])


def _axis_squares(steps: NodeSteps) -> str:
    return _sum_over(steps, _square(steps), [int(steps.attributes.get("axis", -1))])


def _instance_squares(steps: NodeSteps) -> str:
    squares = _square(steps)
    return _total(steps, steps.add("GlobalAveragePool", squares), squares)


def _group_squares(steps: NodeSteps) -> str:
    groups = steps.constant([0, int(steps.attributes["num_groups"]), -1], TensorProto.INT64)
    return _sum_over(steps, steps.add("Reshape", _square(steps), groups), [-1])


def _named(operations: str, what: str, sums: Sums) -> Iterator[tuple[str, tuple[str, Sums]]]:
    for operation in operations.split():
        yield operation, (what, sums)


CHECKS: dict[str, tuple[str, Sums]] = dict(
    [
        *_named("ReduceSum ReduceL1 CumSum", "sum of magnitudes", _magnitudes),
        *_named("ReduceMean GlobalAveragePool", "sum of magnitudes", _mean),
        *_named("AveragePool", "sum of magnitudes", _pool),
        *_named("ReduceSumSquare ReduceL2", "sum of squares", _reduced_squares),
        *_named("LayerNormalization RMSNormalization SimplifiedLayerNormalization", "sum of squares", _normalized_squares),
        *_named("LpNormalization", "sum of squares", _axis_squares),
        *_named("InstanceNormalization", "sum of squares", _instance_squares),
        *_named("GroupNormalization", "sum of squares", _group_squares),
        *_named("MatMul Gemm Conv ConvTranspose Einsum FusedMatMul", "sum of products", _products),
    ]
)
