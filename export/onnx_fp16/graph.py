"""A model's graphs: nodes and values with bodies included, control flow, free names, and groups of operators."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import onnx_ir
from onnx_ir import AttributeType

FLOAT = onnx_ir.DataType.FLOAT
FLOAT16 = onnx_ir.DataType.FLOAT16
_CONTAINERS = (onnx_ir.SequenceType, onnx_ir.OptionalType)  # isinstance is slow here: they are runtime-checked protocols
_GRAPH_TYPES = (AttributeType.GRAPH, AttributeType.GRAPHS)


def bodies(node: onnx_ir.Node) -> Iterator[onnx_ir.Graph]:
    """Yield the graphs in a node's attributes: branches of an If, the body of a Loop."""
    for attribute in node.attributes.values():
        if attribute.type not in _GRAPH_TYPES or attribute.is_ref():
            continue
        if attribute.type == AttributeType.GRAPH:
            yield attribute.as_graph()
        else:
            yield from attribute.as_graphs()


def all_graphs(model: onnx_ir.Model) -> Iterator[onnx_ir.Graph]:
    """Yield the main graph and every body, each before those inside it."""
    yield from _graphs(model.graph)


def all_nodes(model: onnx_ir.Model) -> Iterator[onnx_ir.Node]:
    """Yield every node of the main graph and of the bodies, in order; a node comes before its bodies' nodes."""
    yield from nodes_within(model.graph)


def nodes_within(graph: onnx_ir.Graph) -> Iterator[onnx_ir.Node]:
    """Yield every node of a graph and of the bodies in it."""
    for node in graph:
        yield node
        if node.attributes:
            for body in bodies(node):
                yield from nodes_within(body)


def is_float(value: onnx_ir.Value | None) -> bool:
    """Return whether a value is float32: a tensor, or a sequence or optional of such."""
    return value is not None and value.type is not None and value.dtype == FLOAT


def is_container(value: onnx_ir.Value) -> bool:
    """Return whether a value is a sequence or an optional, which no Cast can convert."""
    return type(value.type) in _CONTAINERS


def constant_of(value: onnx_ir.Value | None) -> onnx_ir.TensorProtocol | None:
    """Return the tensor of a Constant node, or of an initializer that is no graph input; None for any other value."""
    if value is None:
        return None
    producer = value.producer()
    if producer is None:
        return value.const_value if value.is_initializer() and not value.is_graph_input() else None
    if producer.op_type == "Constant" and producer.domain == "":
        attribute = producer.attributes.get("value")
        return attribute.as_tensor() if attribute is not None and attribute.type == AttributeType.TENSOR else None
    return None


def asks_for_infinity(node: onnx_ir.Node) -> bool:
    """Return whether a node only compares with -infinity, as attention does to detect a row that its mask hides whole."""
    if node.domain:
        return False
    if node.op_type == "ReduceMax":
        largest = node.outputs[0]
        return not largest.is_graph_output() and all(asks_for_infinity(use.node) for use in largest.uses())
    sides = [tensor for side in node.inputs if (tensor := constant_of(side)) is not None] if node.op_type == "Equal" else []
    return any(tensor.dtype == FLOAT and bool(np.isneginf(tensor.numpy()).all()) for tensor in sides)


def _graphs(graph: onnx_ir.Graph) -> Iterator[onnx_ir.Graph]:
    yield graph
    for node in graph:
        for body in bodies(node):
            yield from _graphs(body)


class FreshNames:
    """Gives out free names for values and nodes, the same in every run. A body's names must differ from the outer graph's."""

    def __init__(self, model: onnx_ir.Model) -> None:
        self._values = {name for graph in all_graphs(model) for name in _value_names(graph)}
        self._nodes = {node.name for node in all_nodes(model) if node.name}

    def value(self, wanted: str) -> str:
        return _fresh(wanted, self._values)

    def node(self, wanted: str) -> str:
        return _fresh(wanted, self._nodes)


def name_nodes(model: onnx_ir.Model) -> None:
    """Name the nodes that have no name, after operator and position."""
    names = FreshNames(model)
    for index, node in enumerate(all_nodes(model)):
        if not node.name:
            node.name = names.node(f"{node.op_type}_{index}")


def _value_names(graph: onnx_ir.Graph) -> set[str]:
    values = [*graph.inputs, *graph.initializers.values(), *graph.outputs, *(v for node in graph for v in node.outputs)]
    return {value.name for value in values if value.name}


def _fresh(wanted: str, taken: set[str]) -> str:
    name, number = wanted, 1
    while name in taken:
        number += 1
        name = f"{wanted}_{number}"
    taken.add(name)
    return name


# Operators of control flow.
OPERATORS = frozenset({"If", "Loop", "Scan", "SequenceMap"})


@dataclass(kw_only=True, eq=False)
class Slot:
    """A variable of a node with bodies: its values inside and outside of them have one element type.

    Attributes:
        node: The If, Loop, Scan or SequenceMap.
        entering_at: Indices of the node's inputs that enter the bodies.
        inside: Inputs of the bodies.
        leaving_at: Outputs of the bodies: body and output index.
        results: Outputs of the node.
    """

    node: onnx_ir.Node
    entering_at: list[int] = field(default_factory=list)
    inside: list[onnx_ir.Value] = field(default_factory=list)
    leaving_at: list[tuple[onnx_ir.Graph, int]] = field(default_factory=list)
    results: list[onnx_ir.Value] = field(default_factory=list)

    @property
    def entering(self) -> list[onnx_ir.Value]:
        values = (self.node.inputs[index] for index in self.entering_at)
        return [value for value in values if value is not None]

    @property
    def leaving(self) -> list[onnx_ir.Value]:
        return [body.outputs[index] for body, index in self.leaving_at]


def slots_of(node: onnx_ir.Node) -> Iterator[Slot]:
    """Yield the variables of a node with bodies; none for any other node."""
    if node.domain or node.op_type not in OPERATORS:
        return
    graphs = list(bodies(node))
    if node.op_type == "If":
        for index, result in enumerate(node.outputs):
            yield Slot(node=node, leaving_at=[(graph, index) for graph in graphs], results=[result])
    elif node.op_type == "Loop":
        yield from _loop_slots(node, graphs[0], first=2, carried=len(graphs[0].inputs) - 2, body_first_in=2, body_first_out=1)
    elif node.op_type == "Scan":
        scanned = node.attributes.get_int("num_scan_inputs", 0)
        first = 1 if len(node.inputs) > len(graphs[0].inputs) else 0  # Scan-8 has sequence_lens in front
        carried = len(graphs[0].inputs) - scanned
        yield from _loop_slots(node, graphs[0], first=first, carried=carried, body_first_in=0, body_first_out=0)
        for index in range(carried, len(graphs[0].inputs)):
            yield Slot(node=node, entering_at=[first + index], inside=[graphs[0].inputs[index]])
    else:
        yield from _map_slots(node, graphs[0])


def _loop_slots(
    node: onnx_ir.Node, body: onnx_ir.Graph, *, first: int, carried: int, body_first_in: int, body_first_out: int
) -> Iterator[Slot]:
    for index, result in enumerate(node.outputs):
        slot = Slot(node=node, leaving_at=[(body, body_first_out + index)], results=[result])
        if index < carried:
            slot.entering_at.append(first + index)
            slot.inside.append(body.inputs[body_first_in + index])
        yield slot


def _map_slots(node: onnx_ir.Node, body: onnx_ir.Graph) -> Iterator[Slot]:
    for index, inside in enumerate(body.inputs):
        yield Slot(node=node, entering_at=[index], inside=[inside])
    for index, result in enumerate(node.outputs):
        yield Slot(node=node, leaving_at=[(body, index)], results=[result])


def operators(names: str) -> frozenset[str]:
    return frozenset(names.split())


# Their results are numbers of their inputs.
MOVERS = operators(
    """
    Concat DepthToSpace Expand Flatten Gather GatherElements GatherND Identity Pad Reshape Slice SpaceToDepth Split Squeeze Tile
    Transpose Unsqueeze
    """
)
# Elementwise: a result's element depends on the inputs' elements at the same position.
ELEMENTWISE = operators(
    """
    Abs Add Cast Ceil Clip Div Exp Floor Log Max Mean Min Mod Mul Neg Pow Reciprocal Relu Round Sigmoid Sign Softplus Sqrt Sub
    Sum Tanh Where
    """
)
REDUCTIONS = operators("CumSum ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum")
COMPARISONS = operators("Equal Greater GreaterOrEqual Less LessOrEqual")
# Their results are whole numbers: where they meet numbers that were integers, indices are being computed.
ROUNDINGS = operators("Ceil Floor Mod Round")
# Their results are positions. (Sizes, from Shape, mostly scale data, and rounding them does no more harm than rounding data.)
INDEX_SOURCES = operators("ArgMax ArgMin NonMaxSuppression NonZero Range TopK")
# Their results depend on their data only by size, position or count.
DATA_ENDS = operators("ArgMax ArgMin NonMaxSuppression NonZero Shape Size TopK")
# They draw different numbers in each run; so does Dropout in training mode.
RANDOM = operators("Bernoulli Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike")
# Attributes that state an output's type.
TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype", "output_datatype")
PERIODIC = operators("Cos Sin")
LINEAR = operators("Einsum MatMul")

# Indices of the inputs that state a size or a position, by operator.
SHAPE_INPUTS = {
    **dict.fromkeys(("ConstantOfShape", "Loop"), (0,)),
    **dict.fromkeys(operators("AffineGrid CenterCropPad DFT Expand OneHot Pad Reshape Split SplitToSequence"), (1,)),
    **dict.fromkeys(operators("TopK Trilu Upsample"), (1,)),
    "Col2Im": (1, 2),
    "MaxUnpool": (2,),
    "Range": (0, 1, 2),
    "Resize": (1, 2, 3),
    "Slice": (1, 2, 3, 4),
    "Tile": (1, 2),
}
