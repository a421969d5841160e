"""config.pbtxt: the inputs and outputs of a served model, in Triton's format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
from google.protobuf import text_format

from halfserve.export.export_errors import ExportError
from halfserve.export.tasks.task import Task
from halfserve.protos.datatypes import BY_ONNX
from halfserve.protos.model_config_pb2 import DataType, ModelConfig

PLATFORM = "onnxruntime_onnx"
_FLOATING = frozenset({"FLOAT", "FLOAT16", "DOUBLE", "BFLOAT16"})
_FLOATING_CONFIG = frozenset({"FP32", "FP16", "FP64", "BF16"})
REMEDY = "mend that file, delete it to have it written for this model, or use another --name"


def config_for(name: str, model: onnx.ModelProto, *, max_batch_size: int) -> ModelConfig:
    """Return the configuration that describes an ONNX model; `max_batch_size` is 0 for one without a batch dimension.

    Dims are without the batch dimension, whole shapes where there is none, and -1 for any size. Triton refuses empty dims: a
    tensor with only the batch dimension gets dims `[1]` reshaped to none; a scalar gets dims `[1]` and no reshape, which Triton
    refuses there.

    Raises:
        ExportError: An input's or output's first dimension is fixed although batches are asked for, or a type has no name in
            the protocol.
    """
    config = ModelConfig(name=name, platform=PLATFORM, max_batch_size=max_batch_size)
    initialized = {tensor.name for tensor in model.graph.initializer}
    for value in model.graph.input:
        if value.name not in initialized:
            _describe(config.input.add(), value, batched=max_batch_size > 0)
    for value in model.graph.output:
        _describe(config.output.add(), value, batched=max_batch_size > 0)
    if max_batch_size > 0:
        config.dynamic_batching.SetInParent()
    return config


def padding_text(config: ModelConfig, task: Task) -> str:
    """Return how a server may pad texts of different lengths for one batch, as `halfserve.padding` takes it; empty for none."""
    if not task.padding or not config.max_batch_size:
        return ""
    inputs = " ".join(f"{name}[1]={value}" for name, value in task.padding.items())
    cut = " ".join(f"{output.name}[1]" for output in config.output) if task.per_token else ""
    return f"{inputs} -> {cut}" if cut else inputs


def read_config(content: bytes, path: str) -> ModelConfig:
    """Parse a config.pbtxt.

    Raises:
        ExportError: It is not one; the text says where.
    """
    try:
        return text_format.Parse(content.decode(), ModelConfig())
    except (text_format.ParseError, UnicodeDecodeError) as error:
        raise ExportError(f"{path} is no model configuration: {error}; mend it or remove it to have it rewritten") from error


def write_config(config: ModelConfig) -> bytes:
    """Return the configuration as the text of a config.pbtxt."""
    return text_format.MessageToString(config).encode()


def served_config(path: Path, wanted: ModelConfig) -> ModelConfig:
    """Return the configuration that a server has of a model: that of the file at `path`, with the inputs and outputs that it
    omits.

    `wanted` describes the model, and is the configuration where there is no file.

    Raises:
        ExportError: The file is no configuration.
        OSError: As the system reports it.
    """
    if not path.is_file():
        return wanted
    config = read_config(path.read_bytes(), str(path))
    inputs, outputs = {tensor.name for tensor in config.input}, {tensor.name for tensor in config.output}
    config.input.extend(tensor for tensor in wanted.input if tensor.name not in inputs)
    for tensor in wanted.output:
        if tensor.name not in outputs:
            config.output.append(tensor)
            config.output[-1].ClearField("label_filename")  # this file says nothing of labels
    return config


def require_agreement(existing: ModelConfig, wanted: ModelConfig, path: str, *, is_converted: bool = True) -> None:
    """Check that a configuration, which a user may have edited, describes the model; fields that it omits are not checked.

    Unless the model `is_converted`, one floating type is as good as another.

    Raises:
        ExportError: The configuration at `path` has another name, platform, input or output; the text says which.
    """
    for field in ("name", "platform"):
        there, here = getattr(existing, field), getattr(wanted, field)
        if there and there != here:
            raise ExportError(f"{path} says {field} {there!r}, this model needs {here!r}; {REMEDY}")
    if bool(existing.max_batch_size) != bool(wanted.max_batch_size):
        raise ExportError(
            f"{path} says max_batch_size {existing.max_batch_size}, this model {wanted.max_batch_size}; make them agree"
        )
    for kind in ("input", "output"):
        theirs, ours = (
            {tensor.name: _text(tensor, with_floats=is_converted) for tensor in getattr(config, kind)}
            for config in (existing, wanted)
        )
        _require_same_tensors(kind, theirs, ours, path)


def require_twin(model: onnx.ModelProto, twin: onnx.ModelProto) -> None:
    """Check that a float32 model can replace an fp16 one: the same names, and the same types except for floats.

    Raises:
        ExportError: A tensor differs; the text names it.
    """
    for kind in ("input", "output"):
        ours, theirs = _kinds(model, kind), _kinds(twin, kind)
        for name in [*ours, *theirs]:
            if ours.get(name) != theirs.get(name):
                here, there = (kinds.get(name, "absent") for kinds in (ours, theirs))
                raise ExportError(
                    f"the float32 twin is of another model: its {kind} {name!r} is {there}, the fp16 model's is {here}"
                )


def _kinds(model: onnx.ModelProto, kind: str) -> dict[str, str]:
    initialized = {tensor.name for tensor in model.graph.initializer}
    values = [value for value in getattr(model.graph, kind) if value.name not in initialized]
    types = {value.name: onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type) for value in values}
    return {name: "floating" if text in _FLOATING else text for name, text in types.items()}


def _require_same_tensors(kind: str, theirs: Mapping[str, str], ours: Mapping[str, str], path: str) -> None:
    for name, text in theirs.items():
        if ours.get(name) != text:
            has = f"the model has {ours[name]}" if name in ours else f"the model's are {', '.join(ours)}"
            raise ExportError(f"{path} says {kind} {name!r} is {text}, {has}; {REMEDY}")
    missing = sorted(ours.keys() - theirs.keys())
    if theirs and missing:
        raise ExportError(f"{path} lacks the {kind} {missing[0]!r} of this model; {REMEDY}")


def _text(tensor: Any, *, with_floats: bool) -> str:
    kind = DataType.Name(tensor.data_type)
    if not with_floats and kind.removeprefix("TYPE_") in _FLOATING_CONFIG:
        kind = "a floating type"
    return f"{kind} {list(tensor.dims)}"


def _describe(entry: Any, value: onnx.ValueInfoProto, *, batched: bool) -> None:
    tensor = value.type.tensor_type
    if tensor.elem_type not in BY_ONNX or not tensor.HasField("shape"):
        raise ExportError(f"{value.name!r} has no known rank and type, which a request needs")
    dims = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim]
    if batched and (not dims or dims[0] != -1):
        raise ExportError(f"{value.name!r} has shape {dims}, without a variable batch dimension first; use --max-batch-size 0")
    shape = dims[1:] if batched else dims
    entry.name = value.name
    entry.data_type = BY_ONNX[tensor.elem_type].config
    entry.dims.extend(shape or [1])
    if batched and not shape:
        entry.reshape.SetInParent()
