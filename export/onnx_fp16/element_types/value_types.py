"""The type of every value of a model, bodies included, whatever its value_info says.

ONNX's own inference comes first; what it leaves open (operators of other domains, inputs of bodies) is filled in from
signatures; what the model itself says about a value counts last.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx
import onnx_ir

from export.files.tensor_outline import outlined
from export.onnx_fp16.element_types.schema_types import fill_from_signatures
from export.onnx_fp16.graph_walk import all_nodes, bodies


def declared_values(model: onnx_ir.Model) -> set[onnx_ir.Value]:
    """The results of nodes that the model itself says something about, in value_info or as outputs."""
    return {value for node in all_nodes(model) for value in node.outputs if value.type is not None or value.shape is not None}


def forget_inferred(model: onnx_ir.Model, declared: set[onnx_ir.Value]) -> None:
    """Take type and shape from results of which the original said nothing, so that the file does not grow by them.

    Outputs of graphs keep theirs.
    """
    for node in all_nodes(model):
        for value in node.outputs:
            if value not in declared and not value.is_graph_output():
                value.type = value.shape = None


def infer_types(model: onnx_ir.Model) -> None:
    """Set type and shape of every value of which something can be said; a contradicting shape is replaced."""
    with outlined(model) as outline:
        proto = outline.proto
        for graph in _proto_graphs(proto.graph):
            del graph.value_info[:]
        try:
            inferred = onnx.shape_inference.infer_shapes(proto)  # propagating data costs minutes where long vectors are added
            if _note_ranks(proto, inferred):
                inferred = onnx.shape_inference.infer_shapes(proto)
        except (onnx.shape_inference.InferenceError, ValueError, RuntimeError):
            inferred = None  # contradictory, or too large for one message: signatures alone
    declared: dict[onnx_ir.Value, onnx_ir.TypeProtocol] = {}
    _forget_types(model.graph, declared, main=True)
    if inferred is not None:
        _take_over(model.graph, inferred.graph)
    fill_from_signatures(model, declared)


def _note_ranks(proto: onnx.ModelProto, inferred: onnx.ModelProto) -> bool:
    """Write down the ranks that are known of what Reshape gives: as many as it was told sizes. ONNX leaves those open.

    Returns:
        Whether there were any.
    """
    found = False
    for graph, known in zip(_proto_graphs(proto.graph), _proto_graphs(inferred.graph), strict=True):
        types = {info.name: info.type.tensor_type for info in (*known.input, *known.output, *known.value_info)}
        shapes = {name: kind.shape for name, kind in types.items() if kind.HasField("shape")}
        for node in known.node:
            if node.op_type != "Reshape" or node.domain or node.output[0] in shapes or len(node.input) < 2:
                continue
            sizes, kind = shapes.get(node.input[1]), types.get(node.output[0])
            if sizes is None or kind is None or len(sizes.dim) != 1 or not sizes.dim[0].dim_value:
                continue
            shape = [None] * sizes.dim[0].dim_value
            graph.value_info.append(onnx.helper.make_tensor_value_info(node.output[0], kind.elem_type, shape))
            found = True
    return found


def _forget_types(graph: onnx_ir.Graph, declared: dict[onnx_ir.Value, onnx_ir.TypeProtocol], *, main: bool) -> None:
    interface = {*graph.outputs} if main else set()
    for node in graph:
        for value in node.outputs:
            if value.type is not None and value not in interface:
                declared[value] = value.type
                value.type = None
        for body in bodies(node):
            _forget_types(body, declared, main=False)


def _take_over(graph: onnx_ir.Graph, proto: onnx.GraphProto) -> None:
    known = {info.name: info for info in [*proto.input, *proto.output, *proto.value_info]}
    for value in graph.inputs:
        _set(value, known.get(value.name or ""))
    for node, node_proto in zip(graph, proto.node, strict=True):
        for value in node.outputs:
            _set(value, known.get(value.name or ""))
        for body, body_proto in zip(bodies(node), _node_bodies(node_proto), strict=True):
            _take_over(body, body_proto)


def _set(value: onnx_ir.Value, info: onnx.ValueInfoProto | None) -> None:
    if info is None or not info.HasField("type") or info.type.WhichOneof("value") is None:
        return
    known = onnx_ir.serde.deserialize_type_proto_for_type(info.type)
    if known is None or known.dtype == onnx_ir.DataType.UNDEFINED:
        return
    shape = onnx_ir.serde.deserialize_type_proto_for_shape(info.type)
    if value.type is None or value.type != known:
        value.type = known
    if shape is not None and (value.shape is None or _contradict(value.shape, shape)):
        value.shape = shape


def _contradict(ours: onnx_ir.Shape, inferred: onnx_ir.Shape) -> bool:
    if len(ours) != len(inferred):
        return True
    pairs = zip(ours, inferred, strict=True)
    return any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs)


def _node_bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == onnx.AttributeProto.GRAPHS:
            yield from attribute.graphs


def _proto_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for body in _node_bodies(node):
            yield from _proto_graphs(body)
