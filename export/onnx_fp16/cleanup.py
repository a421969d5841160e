"""Takes out casts that change nothing: equal types, lossless pairs, duplicates, and those nobody uses any more."""

from __future__ import annotations

from typing import Any

import onnx_ir

from export.onnx_fp16.graph_walk import FLOAT, FLOAT16, all_graphs

# Every float16 number is one of these, so a cast there and back changes nothing.
_WIDER = frozenset({FLOAT, onnx_ir.DataType.DOUBLE})


def drop_idle_casts(model: onnx_ir.Model) -> int:
    """Remove the casts of a model that change no number.

    Returns:
        How many were removed.
    """
    removed = 0
    for graph in all_graphs(model):
        earlier: dict[tuple[onnx_ir.Value | None, frozenset[tuple[str, Any]]], onnx_ir.Value] = {}
        for node in list(graph):
            if node.op_type == "Cast" and not node.domain and _touches_half(node):
                # Not the type alone: two casts to float8 may differ in whether they saturate.
                key = node.inputs[0], frozenset((name, entry.value) for name, entry in node.attributes.items())
                removed += _simplify(graph, node, earlier.get(key))
                earlier.setdefault(key, node.outputs[0])
    for graph in all_graphs(model):
        for node in reversed(list(graph)):
            if node.op_type == "Cast" and not node.domain and _touches_half(node) and _is_dead(node):
                graph.remove(node, safe=True)
                removed += 1
    return removed


def _simplify(graph: onnx_ir.Graph, node: onnx_ir.Node, twin: onnx_ir.Value | None) -> bool:
    source, result = node.inputs[0], node.outputs[0]
    if source is None or source.dtype is None:
        return False
    origin = _before_pair(source) if result.dtype == FLOAT16 else None
    equal = source if source.dtype == result.dtype else origin or twin
    if equal is None or equal is result:
        return False
    for user, index in list(result.uses()):
        user.replace_input_with(index, equal)
    if not result.is_graph_output():
        graph.remove(node, safe=True)
        return True
    if source.dtype != result.dtype and origin is None:
        return False  # a twin: an output has to be made somewhere
    if equal.producer() is not None and may_be_renamed(equal, graph):
        _replace_output(graph, result, equal)
        graph.remove(node, safe=True)
        return True
    identity = onnx_ir.Node("", "Identity", [equal], name=node.name, metadata_props=dict(node.metadata_props))
    graph.insert_after(node, identity)
    made = identity.outputs[0]
    made.type = result.type
    _replace_output(graph, result, made)
    graph.remove(node, safe=True)
    return True


def may_be_renamed(value: onnx_ir.Value, graph: onnx_ir.Graph) -> bool:
    """Whether a value may take an output's name in a graph: it is of that graph, and its own name is nobody's interface."""
    return value.graph is graph and not value.is_graph_output() and not value.is_graph_input()


def _replace_output(graph: onnx_ir.Graph, old: onnx_ir.Value, new: onnx_ir.Value) -> None:
    name, old.name = old.name, f"{old.name}/replaced"
    new.name, new.doc_string = name, old.doc_string
    if old.shape is not None:
        new.shape = old.shape
    new.metadata_props.update(old.metadata_props)
    new.meta.update(old.meta)
    for place, output in enumerate(graph.outputs):
        if output is old:
            graph.outputs[place] = new


def _before_pair(value: onnx_ir.Value) -> onnx_ir.Value | None:
    """The float16 value that this wider one was cast from."""
    node = value.producer()
    if node is None or node.op_type != "Cast" or node.domain or value.dtype not in _WIDER:
        return None
    source = node.inputs[0]
    return source if source is not None and source.dtype == FLOAT16 else None


def _touches_half(node: onnx_ir.Node) -> bool:
    source = node.inputs[0]
    return FLOAT16 in (node.outputs[0].dtype, source.dtype if source is not None else None)


def _is_dead(node: onnx_ir.Node) -> bool:
    result = node.outputs[0]
    return not result.uses() and not result.is_graph_output()
