"""Names of a graph's inputs and outputs that cannot clash with what is inside it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import onnx_ir

from export.errors import ExportError
from export.to_onnx.dimensions import Dimensions

_WORD = re.compile(r"(\w+)")


def name_values(model: onnx_ir.Model, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Rename the graph's inputs and outputs, in place. A value inside that has such a name gets a longer one.

    An output with an input's name (a model that hands an input through) gets `_output` behind it.

    Raises:
        ExportError: Names repeat, or there are not as many as there are inputs and outputs.
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
            value.name = _free(value.name, taken)
            taken.add(value.name)
    for value, name in zip(current, wanted, strict=True):
        value.name = name


def name_dimensions(model: onnx_ir.Model, dimensions: Dimensions) -> dict[str, str]:
    """Give the symbols that `torch.export` made up (s40) the names that were asked for (batch), in every shape, in place.

    Returns:
        The name of each symbol.

    Raises:
        ExportError: Two names came out as one size.
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
                    f"the model's code takes dimensions {names[symbol]!r} and {name!r} for one; give examples in which their "
                    "sizes differ, or give both the same name"
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


def _free(name: str, taken: set[str | None]) -> str:
    number = 1
    while f"{name}_inner_{number}" in taken:
        number += 1
    return f"{name}_inner_{number}"
