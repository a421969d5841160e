"""Read the inputs and outputs of an ONNX file as its clients will see them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx

from protos.datatypes import BY_ONNX
from serve.backends.onnx_runtime.onnx_file import open_onnx
from serve.backends.open_ended import is_open_ended
from serve.engine.backend import ModelInterface
from serve.engine.errors import ModelLoadError
from serve.engine.tensors import ANY_SIZE, TensorSpec

UNKNOWN = "unk__"  # what tf2onnx calls a dimension, with a number of its own each, when nobody has named it


def read_interface(path: Path) -> ModelInterface:
    """The interface of the model file; its weights are not read.

    Raises:
        ModelLoadError: the file is not ONNX, or a value has no counterpart on the wire.
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
        inputs=inputs, outputs=outputs, batched=batched, row_names=names, data_files=files, open_ended=open_ended
    )


def _require_names(graph: onnx.GraphProto, path: Path) -> None:
    """Check that clients can name every input and output: protobuf reads what is not UTF-8 as bytes."""
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
    if not tensor.HasField("shape"):
        raise ModelLoadError(f"{where} {value.name!r} has no shape, not even a rank; export the model with one")
    # ONNX Runtime takes any size where a negative one is written.
    shape = tuple(max(ANY_SIZE, d.dim_value) if d.HasField("dim_value") else ANY_SIZE for d in tensor.shape.dim)
    return TensorSpec(name=value.name, datatype=datatype, shape=shape)
