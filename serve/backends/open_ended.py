"""Which models may compute one batch for any time, whatever their batches of that shape took before.

Others take about as long for each batch of a shape. One that loops as often as a value says, or makes tensors as large as a
value says, does not, nor does one that takes strings: their lengths are in no shape.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from onnx import GraphProto, ModelProto, NodeProto, TensorProto

LOOPS = frozenset({"Loop", "BeamSearch", "GreedySearch", "Sampling", "WhisperBeamSearch"})
# Places of the inputs that say how large an output is to be.
SIZES = {
    **dict.fromkeys(("BlackmanWindow", "ConstantOfShape", "HammingWindow", "HannWindow", "ImageDecoder"), (0,)),
    **dict.fromkeys(
        ("AffineGrid", "CenterCropPad", "Col2Im", "DFT", "Expand", "OneHot", "Pad", "STFT", "Tile", "Upsample"), (1,)
    ),
    "MaxUnpool": (2,),
    "MelWeightMatrix": (0, 1),
    "Range": (0, 1, 2),
    "Resize": (1, 2, 3),
}
BRANCHES = frozenset({"If", "Scan", "SequenceMap"})  # and what else runs graphs of its own, but for loops
OF_SHAPES = frozenset({"Shape", "Size"})  # what they give is the same for all values


def is_open_ended(model: ModelProto) -> bool:
    """Whether the values in a batch decide how long it takes. Weights may be left out of the model."""
    graph = model.graph
    weights = {tensor.name for tensor in graph.initializer}
    given = [value for value in graph.input if value.name not in weights]
    if any(value.type.tensor_type.elem_type == TensorProto.STRING for value in given):
        return True
    # What a function is called with is not looked at: it is taken to be values.
    return _in_nodes(graph.node, {value.name for value in given}) or any(
        _in_nodes(function.node, set(function.input)) for function in model.functions
    )


def _in_nodes(nodes: Iterable[NodeProto], values: set[str]) -> bool:
    """Look through nodes in order; `values` are the names that depend on a request's values, and those of results are added."""
    for node in nodes:
        kind, inputs = node.op_type, node.input
        if kind in LOOPS or any(inputs[place] in values for place in SIZES.get(kind, ()) if place < len(inputs)):
            return True
        if kind in BRANCHES:
            if any(_in_graph(attribute.g, values) for attribute in node.attribute):
                return True
            values.update(node.output)
        elif kind not in OF_SHAPES and not values.isdisjoint(inputs):
            values.update(node.output)
    return False


def _in_graph(graph: GraphProto, values: AbstractSet[str]) -> bool:
    return _in_nodes(graph.node, {*values, *(value.name for value in graph.input)})
