"""Names of an exported graph's inputs, outputs, dimensions and weights."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

import onnx_ir
import torch
from onnx_ir.tensor_adapters import TorchTensor

from halfserve.export.export_errors import ExportError
from halfserve.export.to_onnx.capture import WRAPPED
from halfserve.export.to_onnx.dimensions import Dimensions

_WORD = re.compile(r"(\w+)")


def name_values(model: onnx_ir.Model, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Rename the graph's inputs and outputs, in place; inner values of the same names get longer ones.

    An output with an input's name (a model that returns an input) gets the suffix `_output`.

    Raises:
        ExportError: Names repeat, or their number differs from the inputs' and outputs'.
    """
    outputs = [f"{name}_output" if name in inputs else name for name in outputs]
    wanted, current = [*inputs, *outputs], [*model.graph.inputs, *model.graph.outputs]
    repeated = next((name for name in wanted if not name or wanted.count(name) > 1), None)
    if repeated is not None or len(wanted) != len(current):
        complaint = f"{repeated!r} repeats" if repeated is not None else f"the model has {len(current)}"
        raise ExportError(f"input and output names must be one each and differ; got {wanted}, {complaint}")
    inside = [value for value in _inner_values(model) if not any(value is outer for outer in current)]
    taken = {value.name for value in inside} | set(wanted)
    for value in inside:
        if value.name in wanted:
            value.name = _unused(value.name, taken)
            taken.add(value.name)
    for value, name in zip(current, wanted, strict=True):
        value.name = name


def name_dimensions(model: onnx_ir.Model, dimensions: Dimensions) -> dict[str, str]:
    """Replace the symbols of `torch.export` (s40) by the caller's names (batch) in every shape, in place.

    Returns:
        The name of each symbol.

    Raises:
        ExportError: Two names became one symbol.
    """
    names: dict[str, str] = {}
    for value, axes in zip(model.graph.inputs, dimensions.axes, strict=True):
        for axis, name in axes.items():
            size = value.shape[axis] if value.shape is not None else None
            symbol = size.value if isinstance(size, onnx_ir.SymbolicDim) else None
            root = getattr(dimensions.dims[name], "root", None)  # where the size is a multiple, of this one
            if root is not None and symbol and (multiple := re.fullmatch(r"\d+\*(\w+)", symbol)):
                names.setdefault(multiple[1], root.__name__)
            if symbol and symbol.isidentifier() and names.setdefault(symbol, name) != name:
                raise ExportError(
                    f"the model's code makes dimensions {names[symbol]!r} and {name!r} equal; give examples in which their "
                    "sizes differ, or give both one name"
                )
    for graph in model.graphs():
        for value in (*graph.inputs, *(out for node in graph for out in node.outputs)):
            if value.shape is not None and not value.shape.is_static():
                value.shape = _renamed(value.shape, names)
    return names


def _renamed(shape: onnx_ir.Shape, names: Mapping[str, str]) -> onnx_ir.Shape:
    return onnx_ir.Shape([_renamed_size(size, names) if isinstance(size, onnx_ir.SymbolicDim) else size for size in shape])


def _renamed_size(size: onnx_ir.SymbolicDim, names: Mapping[str, str]) -> onnx_ir.SymbolicDim:
    if size.value is None:
        return size
    words = _WORD.split(size.value)
    return onnx_ir.SymbolicDim("".join(names.get(word, word) for word in words))


def _inner_values(model: onnx_ir.Model) -> list[onnx_ir.Value]:
    values: dict[int, onnx_ir.Value] = {}
    for graph in model.graphs():
        for value in (*graph.inputs, *graph.initializers.values(), *(out for node in graph for out in node.outputs)):
            values[id(value)] = value
    return list(values.values())


def _unused(name: str, taken: set[str | None]) -> str:
    number = 1
    while f"{name}_inner_{number}" in taken:
        number += 1
    return f"{name}_inner_{number}"


def name_weights(model: onnx_ir.Model) -> None:
    """Give the initializers the names that the parameters have in the module, in place."""
    taken = {value.name for node in model.graph.all_nodes() for value in node.outputs} | set(model.graph.initializers)
    for value in list(model.graph.initializers.values()):
        name = (value.name or "").removeprefix(f"{WRAPPED}.")
        if name == value.name:
            continue
        while name in taken:
            name = f"{name}_weight"
        taken.add(name)
        value.name = name


def transpose_weights(model: onnx_ir.Model) -> None:
    """Replace each weight that is only read through a Transpose by its transposed view, without a copy; in place.

    A weight that is also read otherwise (an embedding tied to the last layer) keeps its Transpose: it would be stored twice.
    """
    for value in list(model.graph.initializers.values()):
        by_order = defaultdict(list)
        for use in value.uses():
            order = use.node.attributes.get_ints("perm") if use.node.op_type == "Transpose" else None
            by_order[tuple(order) if order is not None else None].append(use.node)
        order = next(iter(by_order), None)
        shown = any(node.outputs[0].is_graph_output() for nodes in by_order.values() for node in nodes)
        tensor = getattr(value.const_value, "raw", None)
        if len(by_order) == 1 and order is not None and isinstance(tensor, torch.Tensor) and not shown:
            _replace(model, value, by_order[order], tensor.detach().permute(order))


def _replace(model: onnx_ir.Model, value: onnx_ir.Value, nodes: list[onnx_ir.Node], tensor: torch.Tensor) -> None:
    name = value.name or ""
    stored = onnx_ir.Value(name=name, type=value.type, shape=onnx_ir.Shape(tensor.shape))
    stored.const_value = TorchTensor(tensor, name=name)
    for node in nodes:
        node.outputs[0].replace_all_uses_with(stored, replace_graph_outputs=False)
        if node.graph is not None:
            node.graph.remove(node, safe=True)
    model.graph.initializers.pop(name)
    model.graph.register_initializer(stored)
