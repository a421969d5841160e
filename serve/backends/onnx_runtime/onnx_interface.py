"""The interface of an ONNX file: inputs and outputs as clients see them, and whether its latency depends on values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import onnx
from onnx import ModelProto, NodeProto, TensorProto

from halfserve.protos.datatypes import BY_ONNX
from halfserve.serve.backends.onnx_runtime.onnx_file import nodes_below, open_onnx
from halfserve.serve.engine.backend import ModelInterface
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.tensors import ANY_SIZE, TensorSpec

UNKNOWN = "unk__"  # prefix of tf2onnx's generated names of unnamed dimensions
LOOPS = frozenset({"Loop", "BeamSearch", "GreedySearch", "Sampling", "WhisperBeamSearch"})
# Indices of the inputs that determine an output's size, by operator.
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
BRANCHES = frozenset({"If", "Scan", "SequenceMap"})  # other operators with subgraphs
STANDARD = frozenset({"", "ai.onnx", "ai.onnx.ml", "com.microsoft"})  # domains of operators that are known here
OF_SHAPES = frozenset({"Shape", "Size"})  # operators whose results do not depend on values


def read_interface(path: Path) -> ModelInterface:
    """Read a model file's interface without its weights.
    Raises ModelLoadError: the file is not ONNX, or a value has no wire type.
    """
    with open_onnx(path) as opened:
        graph, files, open_ended = opened.model.graph, opened.data_files, is_open_ended(opened.model)
    _require_names(graph, path)
    constants = {tensor.name for tensor in graph.initializer}  # IR 3 lists initializers among the inputs
    taken = [value for value in graph.input if value.name not in constants]
    inputs = tuple(_spec(value, f"{path}: input") for value in taken)
    outputs = tuple(_spec(value, f"{path}: output") for value in graph.output)
    specs = (*inputs, *outputs)
    batched = bool(inputs and outputs) and all(spec.shape[:1] == (ANY_SIZE,) for spec in specs)
    firsts = [value.type.tensor_type.shape.dim[0].dim_param for value in (*taken, *graph.output)] if batched else []
    names = frozenset(name for name in firsts if name and not name.startswith(UNKNOWN))
    return ModelInterface(
        inputs=inputs,
        outputs=outputs,
        batched=batched,
        row_names=names,
        data_files=files,
        open_ended=open_ended,
        unranked=frozenset(value.name for value in (*taken, *graph.output) if not value.type.tensor_type.HasField("shape")),
    )


def _require_names(graph: onnx.GraphProto, path: Path) -> None:
    """Check that inputs and outputs have unique UTF-8 names; protobuf returns other names as bytes."""
    for kind, values in (("input", graph.input), ("output", graph.output)):
        names = [value.name for value in values]
        dimensions = [d.dim_param for value in values for d in value.type.tensor_type.shape.dim]
        if not all(isinstance(name, str) for name in (*names, *dimensions)):
            raise ModelLoadError(f"{path}: an {kind} has a name that is not UTF-8; export the model again")
        twice = next((name for name, count in Counter(names).items() if count > 1), None)
        if twice is not None:
            raise ModelLoadError(f"{path}: {kind} {twice!r} is there twice, expected each once; export the model again")


def _spec(value: onnx.ValueInfoProto, where: str) -> TensorSpec:
    if value.type.WhichOneof("value") != "tensor_type":
        raise ModelLoadError(f"{where} {value.name!r} is not a tensor; the wire carries tensors only")
    tensor = value.type.tensor_type
    datatype = BY_ONNX.get(tensor.elem_type)
    if datatype is None:
        known = tensor.elem_type in onnx.TensorProto.DataType.values()
        name = onnx.TensorProto.DataType.Name(tensor.elem_type) if known else f"number {tensor.elem_type}"
        raise ModelLoadError(f"{where} {value.name!r} has the type {name}, which cannot be served; cast it inside the model")
    # ONNX Runtime treats negative sizes as unknown, and reports a tensor without a rank as one without dimensions.
    shape = tuple(max(ANY_SIZE, d.dim_value) if d.HasField("dim_value") else ANY_SIZE for d in tensor.shape.dim)
    return TensorSpec(name=value.name, datatype=datatype, shape=shape)


def is_open_ended(model: ModelProto) -> bool:
    """Return whether the compute time of a batch depends on values, not on shapes alone. Weights may be left out of the model.

    It depends on values if these control loops or tensor sizes, and for strings, whose lengths are not in the shape. It may
    depend on them for custom operators, such as image decoders.
    """
    graph = model.graph
    weights = {tensor.name for tensor in graph.initializer}
    given = [value for value in graph.input if value.name not in weights]
    if any(value.type.tensor_type.elem_type == TensorProto.STRING for value in given):
        return True
    own = {(function.domain, function.name) for function in model.functions}
    nodes = nodes_below(graph.node, *(function.node for function in model.functions))
    if any(node.domain not in STANDARD and (node.domain, node.op_type) not in own for node in nodes):
        return True
    # Function arguments are assumed to be values.
    return _in_nodes(graph.node, {value.name for value in given}) or any(
        _in_nodes(function.node, set(function.input)) for function in model.functions
    )


def _in_nodes(nodes: Iterable[NodeProto], values: set[str]) -> bool:
    """Check nodes in order; `values` has the names that depend on a request's values, and grows with results."""
    for node in nodes:
        kind, inputs = node.op_type, node.input
        if kind in LOOPS or any(inputs[place] in values for place in SIZES.get(kind, ()) if place < len(inputs)):
            return True
        if kind in BRANCHES:
            for graph in (attribute.g for attribute in node.attribute):
                if _in_nodes(graph.node, {*values, *(value.name for value in graph.input)}):
                    return True
            values.update(node.output)
        elif kind not in OF_SHAPES and not values.isdisjoint(inputs):
            values.update(node.output)
    return False
