"""Queries and edits that repairs share: constants, readers, marks, new nodes, replaced values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeAlias

import numpy as np
import onnx_ir

from halfserve.export.onnx_fp16.conversion_report import Repair
from halfserve.export.onnx_fp16.graph import FLOAT, constant_of
from halfserve.export.onnx_fp16.planning.plan import KEEP_FP32

Array: TypeAlias = np.ndarray[Any, Any]

FIRST_IR_WITH_CONSTANT_INITIALIZERS = 4


@dataclass(frozen=True, kw_only=True)
class RepairPass:
    """A rewrite of a float32 model that changes no result.

    Attributes:
        name: The repair's name in reports and errors.
        call: Rewrites a model in place.
        left: Finds what the pass should have repaired: empty after `call`.
    """

    name: str
    call: Callable[[onnx_ir.Model], list[Repair]]
    left: Callable[[onnx_ir.Model], Iterable[onnx_ir.Node]] = lambda _: ()


def repair(pass_name: str, nodes: Iterable[onnx_ir.Node], text: str) -> Repair:
    return Repair(pass_name=pass_name, nodes=tuple(node.name or "" for node in nodes), text=text)


def is_op(node: onnx_ir.Node | None, *types: str) -> bool:
    """Return whether a node has one of these operators of ONNX's own domain."""
    return node is not None and node.domain in ("", "ai.onnx") and node.op_type in types


def is_kept(*nodes: onnx_ir.Node) -> bool:
    """Return whether a user or a repair marked one of the nodes to stay float32 as it is."""
    return any(KEEP_FP32 in node.metadata_props for node in nodes)


def keep(nodes: Iterable[onnx_ir.Node], reason: str, pass_name: str) -> list[Repair]:
    """Mark nodes to stay float32; report the nodes that were not marked before."""
    fresh = [node for node in dict.fromkeys(nodes) if not is_kept(node)]
    for node in fresh:
        node.metadata_props[KEEP_FP32] = reason
    return [repair(pass_name, fresh, f"kept in float32: {reason}")] if fresh else []


def opset_of(model: onnx_ir.Model) -> int:
    return model.opset_imports.get("", 1)


def array_of(value: onnx_ir.Value | None) -> Array | None:
    """Return a float32 constant's numbers in float64; None for any other value."""
    tensor = constant_of(value)
    return tensor.numpy().astype(np.float64) if tensor is not None and tensor.dtype == FLOAT else None


def number_of(value: onnx_ir.Value | None) -> float | None:
    """Return the number of a float32 constant with one element; None for any other value."""
    tensor = constant_of(value)
    if tensor is None or tensor.dtype != FLOAT or tensor.size != 1:
        return None
    return float(tensor.numpy().reshape(()))


def axes_of(node: onnx_ir.Node) -> list[int] | None:
    """Return the axes of a reduction, from its attribute or its constant input; None where they are not known, or all are
    meant.
    """
    attribute = node.attributes.get("axes")
    if attribute is not None:
        return list(attribute.as_ints())
    tensor = constant_of(node.inputs[1]) if len(node.inputs) > 1 else None
    if tensor is None or tensor.dtype not in (onnx_ir.DataType.INT64, onnx_ir.DataType.INT32):
        return None
    return [int(number) for number in tensor.numpy().reshape(-1)]


def keeps_axes(node: onnx_ir.Node) -> bool:
    """Return whether a reduction leaves the axes that it reduces, with size 1."""
    return node.attributes.get_int("keepdims", 1) == 1


def only_reader(value: onnx_ir.Value) -> onnx_ir.Node | None:
    """Return the node that alone reads a value, once; None where others do, or the value is a graph output."""
    uses = value.uses()
    if len(uses) != 1 or value.is_graph_output():
        return None
    return next(iter(uses)).node


def made_for(reader: onnx_ir.Node | None, value: onnx_ir.Value | None, *types: str) -> onnx_ir.Node | None:
    """Return the maker of a value if it has one of these operators, is of the reader's graph, and no other node reads the
    value.
    """
    node = value.producer() if value is not None else None
    if value is None or node is None or reader is None or not is_op(node, *types) or node.graph is not reader.graph:
        return None
    return node if only_reader(value) is reader else None


def readers(value: onnx_ir.Value) -> list[onnx_ir.Node]:
    """Return the nodes that read a value, each once, in the order in which they were connected."""
    return list(dict.fromkeys(use.node for use in value.uses()))


def other_input(node: onnx_ir.Node, value: onnx_ir.Value) -> onnx_ir.Value | None:
    """Return the input of a two-input node that is not `value`."""
    return node.inputs[1] if node.inputs[0] is value else node.inputs[0]


class NodeBuilder:
    """Makes nodes and constants in one model, with free names that are the same in every run."""

    def __init__(self, model: onnx_ir.Model) -> None:
        self._main = model.graph
        self._old_format = model.ir_version < FIRST_IR_WITH_CONSTANT_INITIALIZERS
        graphs = [model.graph, *model.graph.subgraphs()]
        self._taken = {value.name for graph in graphs for value in (*graph.inputs, *graph.initializers.values())}
        for node in model.graph.all_nodes():
            self._taken.update([node.name, *(output.name for output in node.outputs)])

    def name(self, stem: str) -> str:
        stems = (f"{stem}_{number}" if number else stem for number in count())
        free = next(name for name in stems if name not in self._taken)
        self._taken.add(free)
        return free

    def constant(self, stem: str, array: Array) -> onnx_ir.Value:
        """Return a float32 (or int64) constant of the main graph, where bodies see it too.

        Formats before IR 4 list every initializer as an input, which callers may replace; there it is a Constant node.
        """
        kind = np.float32 if np.issubdtype(array.dtype, np.floating) else array.dtype
        name = self.name(stem)
        tensor = onnx_ir.tensor(np.ascontiguousarray(array, kind).reshape(array.shape), name=name)
        value = onnx_ir.Value(name=name, shape=onnx_ir.Shape(array.shape), type=onnx_ir.TensorType(tensor.dtype))
        if self._old_format:
            made = onnx_ir.node("Constant", [], {"value": tensor}, outputs=[value], name=self.name(f"{name}/constant"))
            self._main.insert_before(self._main[0], made)
        else:
            value.const_value = tensor
            self._main.register_initializer(value)
        return value

    def node(
        self,
        op_type: str,
        inputs: Sequence[onnx_ir.Value | None],
        like: onnx_ir.Node,
        kind: onnx_ir.TypeProtocol | None = None,
        *,
        behind: bool = False,
        outputs: int = 1,
        **attributes: Any,
    ) -> onnx_ir.Node:
        """Return a node before `like`, or behind it, with its metadata; outputs are float32 unless `kind` names
        another type.
        """
        name = self.name(f"{like.name}/{op_type}")
        made = onnx_ir.node(op_type, inputs, attributes=attributes, name=name, num_outputs=outputs)
        made.metadata_props.update(like.metadata_props)
        for output in made.outputs:
            output.name, output.type = self.name(f"{name}_output"), kind or onnx_ir.TensorType(FLOAT)
        if like.graph is None:
            raise ValueError(like.name)
        if behind:
            like.graph.insert_after(like, made)
        else:
            like.graph.insert_before(like, made)
        return made


def take_place(new: onnx_ir.Value, old: onnx_ir.Value) -> None:
    """Let all readers of `old` read `new`, under the name of `old`."""
    name = old.name
    new.type, new.shape = old.type, old.shape
    onnx_ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    old.name = f"{name}/replaced"
    new.name = name


def drop(*nodes: onnx_ir.Node | None) -> None:
    """Remove the nodes that have no readers left, and then the constants that only they read."""
    waiting = [node for node in nodes if node is not None]
    while idle := [node for node in waiting if not any(value.uses() or value.is_graph_output() for value in node.outputs)]:
        for node in dict.fromkeys(idle):
            inputs = list(dict.fromkeys(node.inputs))
            if node.graph is not None:
                node.graph.remove(node, safe=True)
            for value in inputs:
                if value is not None:
                    drop_constant(value)
        waiting = [node for node in waiting if node not in idle]


def drop_constant(value: onnx_ir.Value) -> None:
    """Remove a constant that has no readers left; any other value stays."""
    if value.uses() or value.is_graph_output():
        return
    maker, graph = value.producer(), value.graph
    if maker is not None:
        if is_op(maker, "Constant"):
            drop(maker)
    elif graph is not None and value.name is not None and value.is_initializer() and not value.is_graph_input():
        del graph.initializers[value.name]
