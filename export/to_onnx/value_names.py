"""Names of a graph's inputs and outputs that cannot clash with what is inside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx

from export.errors import ExportError

if TYPE_CHECKING:
    from collections.abc import Iterator, MutableSequence, Sequence


def placeholders(kind: str, count: int) -> list[str]:
    """Names for the exporter to use meanwhile: given real ones, it may use the same name for a value inside the graph."""
    return [f"__halfserve_{kind}_{index}" for index in range(count)]


def name_values(model: onnx.ModelProto, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Rename the graph's inputs and outputs, in place. A value inside that has such a name gets a longer one.

    An output with an input's name (a model that hands an input through) gets `_output` behind it.

    Raises:
        ExportError: Names repeat, or there are not as many as there are inputs and outputs.
    """
    outputs = [f"{name}_output" if name in inputs else name for name in outputs]
    wanted = [*inputs, *outputs]
    repeated = next((name for name in wanted if not name or wanted.count(name) > 1), None)
    current = [value.name for value in [*model.graph.input, *model.graph.output]]
    if repeated is not None or len(wanted) != len(current):
        complaint = f"{repeated!r} repeats" if repeated is not None else f"the model has {current}"
        raise ExportError(f"input and output names must be one each and differ; got {wanted}, {complaint}")
    inside = {name for graph in _graphs(model.graph) for node in graph.node for name in node.output}
    inside |= {tensor.name for graph in _graphs(model.graph) for tensor in graph.initializer}
    renamed = {name: _free(name, inside | set(wanted)) for name in wanted if name in inside}
    renamed |= dict(zip(current, wanted, strict=True))
    for graph in _graphs(model.graph):
        _rename(graph, renamed)


def _free(name: str, taken: set[str]) -> str:
    number = 1
    while f"{name}_inner_{number}" in taken:
        number += 1
    return f"{name}_inner_{number}"


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _graphs(attribute.g)
            for body in attribute.graphs:
                yield from _graphs(body)


def _rename(graph: onnx.GraphProto, names: dict[str, str]) -> None:
    for node in graph.node:
        _rename_all(node.input, names)
        _rename_all(node.output, names)
    for tensor in graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    for value in [*graph.input, *graph.output, *graph.value_info]:
        value.name = names.get(value.name, value.name)


def _rename_all(entries: MutableSequence[str], names: dict[str, str]) -> None:
    for index, name in enumerate(entries):
        entries[index] = names.get(name, name)
