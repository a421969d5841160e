"""How large sums grow inside nodes whose rounded result gives nothing away.

A mean of 300 squares may be 4e4 and fit float16 while their sum, 1.2e7, does not. ONNX Runtime's CUDA kernels sum in float32,
so nothing happens there; a runtime that sums in float16, as TensorRT may in strongly typed networks, overflows. Which it does
cannot be seen in a node's inputs and outputs, so a rounded model (`export.verification.simulate`) is asked here for one more
number from each such node: the sum of magnitudes (or squares) of what the node adds up, an upper bound of every partial sum in
every order. Norms, reductions and pools are cheap to ask; matrix products and convolutions cost as much again as the model.

Softmax is not asked: with the largest value subtracted, its sum is at most the length of the axis. What sums inside and cannot
be asked is named: attention and recurrent layers, and nodes in bodies of If, Loop and Scan, whose values cannot leave them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import TensorProto, helper

from export.certificate.risk import Risk
from export.verification.simulate import BEFORE_ROUNDING, bodies_of, simulated_node
from export.weight_ledger import FP16_MAX

PREFIX = "halfserve/reach/"


@dataclass(frozen=True, kw_only=True)
class Checks:
    """A rounded model that also says how large its sums grow.

    Attributes:
        model: The model; the added outputs, scalars of float32, come after its own.
        risks: For each added output, the risk it stands for; `reach` is still 0.
        unasked: Nodes that sum inside and were not asked, each as its operator and name.
    """

    model: onnx.ModelProto
    risks: tuple[Risk, ...]
    unasked: tuple[str, ...] = ()

    def given_up(self, rounded: onnx.ModelProto) -> Checks:
        """The rounded model itself, with no node asked."""
        named = tuple(f"{risk.op_type} {risk.node!r}" for risk in self.risks)
        return Checks(model=rounded, risks=(), unasked=(*named, *self.unasked))

    def over(self, reaches: Sequence[float]) -> list[Risk]:
        """The risks that are real, given the largest value of each added output; largest first."""
        real = [
            Risk(node=risk.node, op_type=risk.op_type, what=risk.what, reach=float(reach), module=risk.module)
            for risk, reach in zip(self.risks, reaches, strict=True)
            if reach > FP16_MAX
        ]
        return sorted(real, key=lambda risk: -risk.reach)


def with_checks(rounded: onnx.ModelProto, *, products: bool) -> Checks:
    """Add the outputs to a copy of a rounded model.

    Args:
        rounded: What `round_every_node` made.
        products: Whether to ask matrix products and convolutions too.
    """
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
        maker = _Maker(node, opset, f"{PREFIX}{len(risks)}")
        sums(maker)
        nodes += maker.nodes
        model.graph.output.append(helper.make_tensor_value_info(maker.result, TensorProto.FLOAT, []))
        module = next((entry.value for entry in node.metadata_props if entry.key == "halfserve.module"), None)
        risks.append(Risk(node=_name(node), op_type=node.op_type, what=what, reach=0.0, module=module))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return Checks(model=model, risks=tuple(risks), unasked=tuple(_unasked(rounded.graph, products=products)))


def _unasked(graph: onnx.GraphProto, *, products: bool) -> Iterator[str]:
    for node in graph.node:
        if simulated_node(node) and node.op_type in UNBOUNDED:
            yield f"{node.op_type} {_name(node)!r}"
        for body in bodies_of(node):
            yield from _unasked(body, products=products)
            for inner in body.node:
                if simulated_node(inner) and _check_of(inner, products=products) is not None:
                    yield f"{inner.op_type} {_name(inner)!r}"


def _name(node: onnx.NodeProto) -> str:
    return node.name or node.output[0].removesuffix(BEFORE_ROUNDING)


class _Maker:
    """Makes the nodes that bound the sums of one node."""

    def __init__(self, node: onnx.NodeProto, opset: int, prefix: str) -> None:
        self.node = node
        self.opset = opset
        self.result = prefix
        self.nodes: list[onnx.NodeProto] = []
        self.attributes: dict[str, Any] = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}

    def add(self, operation: str, inputs: Sequence[str], **attributes: Any) -> str:
        name = f"{self.result}/{len(self.nodes)}"
        self.nodes.append(helper.make_node(operation, list(inputs), [name], **attributes))
        return name

    def constant(self, value: Any, elem_type: int, dims: Sequence[int]) -> str:
        return self.add("Constant", [], value=helper.make_tensor("value", elem_type, list(dims), value))

    def sum_over(self, x: str, axes: Sequence[int]) -> str:
        if self.opset < 13:
            return self.add("ReduceSum", [x], axes=list(axes))
        return self.add("ReduceSum", [x, self.constant(list(axes), TensorProto.INT64, [len(axes)])])

    def times_share(self, x: str, whole: str, part: str) -> str:
        """X times how many elements of `whole` there are for one of `part`: a mean becomes a sum."""
        sizes = [self.add("Cast", [self.add("Size", [value])], to=TensorProto.FLOAT) for value in (whole, part)]
        return self.add("Mul", [x, self.add("Div", sizes)])

    def finish(self, sums: str) -> None:
        self.nodes.append(helper.make_node("ReduceMax", [sums], [self.result], keepdims=0))


Sums = Callable[[_Maker], None]


def _check_of(node: onnx.NodeProto, *, products: bool) -> tuple[str, Sums] | None:
    if node.op_type in PRODUCTS and not products:
        return None
    return CHECKS.get(node.op_type) if node.domain in ("", "ai.onnx", "com.microsoft") else None


def _magnitudes(maker: _Maker) -> None:
    """The node itself on the magnitudes of what it sums."""
    inputs = [maker.add("Abs", [maker.node.input[0]]), *maker.node.input[1:]]
    maker.finish(maker.add(maker.node.op_type, inputs, **maker.attributes))


def _mean(maker: _Maker) -> None:
    magnitudes = maker.add("Abs", [maker.node.input[0]])
    means = maker.add(maker.node.op_type, [magnitudes, *maker.node.input[1:]], **maker.attributes)
    maker.finish(maker.times_share(means, magnitudes, means))


def _pool(maker: _Maker) -> None:
    elements = 1.0
    for size in maker.attributes["kernel_shape"]:
        elements *= size
    means = maker.add("AveragePool", [maker.add("Abs", [maker.node.input[0]])], **maker.attributes)
    maker.finish(maker.add("Mul", [means, maker.constant([elements], TensorProto.FLOAT, [])]))


def _products(maker: _Maker) -> None:
    """The product of magnitudes, without what is added after it."""
    inputs = maker.node.input if maker.node.op_type == "Einsum" else maker.node.input[:2]
    factors = [maker.add("Abs", [name]) for name in inputs]
    if maker.node.op_type == "Gemm" and maker.opset < 11:  # what is added was no option yet
        factors.append(maker.constant([0.0], TensorProto.FLOAT, [1]))
    attributes = {name: abs(value) if name == "alpha" else value for name, value in maker.attributes.items() if name != "beta"}
    maker.finish(maker.add(maker.node.op_type, factors, domain=maker.node.domain, **attributes))


def _square(maker: _Maker) -> str:
    return maker.add("Mul", [maker.node.input[0]] * 2)


def _reduced_squares(maker: _Maker) -> None:
    inputs = [_square(maker), *maker.node.input[1:]]
    if maker.opset >= 13 and (axes := maker.attributes.pop("axes", None)) is not None:
        inputs.append(maker.constant(list(axes), TensorProto.INT64, [len(axes)]))
    maker.finish(maker.add("ReduceSum", inputs, **maker.attributes))


def _normalized_squares(maker: _Maker) -> None:
    axis = int(maker.attributes.get("axis", -1))
    if axis < 0:
        maker.finish(maker.sum_over(_square(maker), range(axis, 0)))
    else:
        maker.finish(maker.sum_over(maker.add("Flatten", [_square(maker)], axis=axis), [1]))


def _axis_squares(maker: _Maker) -> None:
    maker.finish(maker.sum_over(_square(maker), [int(maker.attributes.get("axis", -1))]))


def _instance_squares(maker: _Maker) -> None:
    squares = _square(maker)
    means = maker.add("GlobalAveragePool", [squares])
    maker.finish(maker.times_share(means, squares, means))


def _group_squares(maker: _Maker) -> None:
    groups = maker.constant([0, int(maker.attributes["num_groups"]), -1], TensorProto.INT64, [3])
    maker.finish(maker.sum_over(maker.add("Reshape", [_square(maker), groups]), [-1]))


def _named(operations: str, what: str, sums: Sums) -> Iterator[tuple[str, tuple[str, Sums]]]:
    for operation in operations.split():
        yield operation, (what, sums)


PRODUCTS = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "FusedMatMul"})
# These sum inside too, of what no output of theirs shows.
_UNBOUNDED = """
    Attention DecoderMaskedMultiHeadAttention DecoderMaskedSelfAttention DeformConv DFT EmbedLayerNormalization FusedConv
    FusedGemm GemmFastGelu GlobalLpPool GroupNorm GroupQueryAttention GRU LpPool LRN LSTM MatMulBnb4 MatMulNBits
    MeanVarianceNormalization MultiHeadAttention NhwcConv PackedAttention PackedMultiHeadAttention QAttention RNN
    SkipGroupNorm SkipLayerNormalization SkipSimplifiedLayerNormalization SparseAttention STFT TransposeMatMul
"""
UNBOUNDED = frozenset(_UNBOUNDED.split())
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
