"""A half-precision model held in float32, so that ONNX Runtime's CPU provider runs it: it has hardly any bfloat16 kernels.

Every half value becomes float32. Weights stay as they are stored, each behind a cast, so that they can be mapped from their
files. With `rounded`, each cast to the half type becomes two, there and back, and the values stay numbers of that type: so a
model whose every node rounds (see `halfserve.export.verification.simulation`) still does. Without, nothing but the weights is
rounded, as where a server computes such a model in float32.

A model may be written in one half type and computed in the other, as a processor with bfloat16 arithmetic computes a float16
file. Then its weights and values are rounded to the second type, and its half inputs and outputs are of the first besides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from halfserve.export.half_types import HalfType
from halfserve.export.onnx_files.proto_graphs import all_graphs
from halfserve.export.onnx_fp16.graph import TYPE_ATTRIBUTES

WEIGHT_SUFFIX, INPUT_SUFFIX, OUTPUT_SUFFIX, ROUNDED_SUFFIX = "/stored", "/given", "/taken", "/narrow"


def hold_in_float32(model: onnx.ModelProto, half: HalfType, *, rounded: bool, written: HalfType | None = None) -> None:
    """Change a model without functions in place, so that values are rounded to `half`.

    Values of the type `written` (`half` by default) are held in float32. With `rounded`, casts to the half type go on to round.
    """
    written = written or half
    border = [written] if written is half else [written, half]
    given = _border(model.graph.input, written) - {tensor.name for tensor in model.graph.initializer}
    taken = set[str]()
    if written is not half:
        taken = _border(model.graph.output, written) & {name for node in model.graph.node for name in node.output}
    for graph in all_graphs(model):
        _rename(graph, {name: f"{name}{INPUT_SUFFIX}" for name in given} | {name: f"{name}{OUTPUT_SUFFIX}" for name in taken})
    for graph in reversed(list(all_graphs(model))):  # bodies before the nodes that hold them are copied
        _hold(graph, half, written, rounded=rounded)
    before = [node for name in sorted(given) for node in _through(border, name, f"{name}{INPUT_SUFFIX}")]
    after = [node for name in sorted(taken) for node in _through([written], f"{name}{OUTPUT_SUFFIX}", name)]
    nodes = [*before, *model.graph.node, *after]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def _border(values: Iterable[onnx.ValueInfoProto], written: HalfType) -> set[str]:
    """Return the names of the model's inputs or outputs of a type."""
    return {value.name for value in values if value.type.tensor_type.elem_type == written.elem_type}


def _hold(graph: onnx.GraphProto, half: HalfType, written: HalfType, *, rounded: bool) -> None:
    stored = {tensor.name for tensor in graph.initializer if tensor.data_type == written.elem_type}
    kept = [value for value in graph.input if value.name not in stored]  # formats before IR 4 list weights as inputs
    del graph.input[:]
    graph.input.extend(kept)
    del graph.value_info[:]
    for value in (*graph.input, *graph.output):
        _widen_type(value.type, written)
    for tensor in graph.initializer:
        if tensor.name in stored:
            tensor.name += WEIGHT_SUFFIX
    change = [] if written is half else [half]
    nodes = [node for name in sorted(stored) for node in _through(change, f"{name}{WEIGHT_SUFFIX}", name)]
    for node in graph.node:
        casts = node.op_type == "Cast" and not node.domain and _number(node, "to") == written.elem_type
        if casts and rounded:
            nodes += _through([half], node.input[0], node.output[0])
            continue
        for attribute in node.attribute:
            _widen_attribute(attribute, half, written)
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)


def _through(types: Sequence[HalfType], source: str, result: str) -> Iterator[onnx.NodeProto]:
    """Casts to each type in turn, and one to float32."""
    for half in types:
        narrow = f"{result}{ROUNDED_SUFFIX}_{half.short}"
        yield helper.make_node("Cast", [source], [narrow], to=half.elem_type)
        source = narrow
    yield helper.make_node("Cast", [source], [result], to=TensorProto.FLOAT)


def _rename(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Rename what nodes read and make; the model's own inputs and outputs keep their names."""
    for node in graph.node:
        for values in (node.input, node.output):
            for index, name in enumerate(values):
                values[index] = names.get(name, name)


def _number(node: onnx.NodeProto, name: str) -> int:
    return next((attribute.i for attribute in node.attribute if attribute.name == name), 0)


def _widen_attribute(attribute: AttributeProto, half: HalfType, written: HalfType) -> None:
    if attribute.name in TYPE_ATTRIBUTES and attribute.i == written.elem_type:
        attribute.i = TensorProto.FLOAT
    if attribute.HasField("tp"):
        _widen_type(attribute.tp, written)
    if attribute.HasField("t") and attribute.t.data_type == written.elem_type:
        array = half.rounded(numpy_helper.to_array(attribute.t).astype(np.float32))
        attribute.t.CopyFrom(numpy_helper.from_array(array, attribute.t.name))


def _widen_type(kind: onnx.TypeProto, written: HalfType) -> None:
    which = kind.WhichOneof("value")
    if which in ("tensor_type", "sparse_tensor_type"):
        tensor = getattr(kind, which)
        if tensor.elem_type == written.elem_type:
            tensor.elem_type = TensorProto.FLOAT
    elif which in ("sequence_type", "optional_type"):
        _widen_type(getattr(kind, which).elem_type, written)
