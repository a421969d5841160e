"""Third-party models with inputs: ONNX's own backend tests and its light model zoo."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from onnx.backend.test import loader

# A model's input or output: an array, a list of them (a sequence), or None (an empty optional).
Value: TypeAlias = Any

KINDS = ("node", "simple", "pytorch-converted", "pytorch-operator", "light")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and its expected answers.

    Attributes:
        kind: One of `KINDS`, or a name of the caller's.
        name: Unique within the kind.
        model: The serialized ModelProto.
        inputs: For each data set, values by input name.
        expected: The outputs in order, for each data set; None if they are not known.
        rtol: Relative tolerance of the expected values for a float32 run.
        atol: Absolute tolerance of the expected values for a float32 run.
    """

    kind: str
    name: str
    model: bytes
    inputs: tuple[dict[str, Value], ...]
    expected: tuple[list[Value], ...] | None = None
    rtol: float = 1e-3
    atol: float = 1e-7


def cases(kind: str) -> Iterator[Case]:
    """All cases of one of `KINDS`, in the order of their names; models whose inputs cannot be built are left out.

    Raises:
        ValueError: There is no such kind.
    """
    if kind not in KINDS:
        raise ValueError(f"no cases of kind {kind!r}; there are {', '.join(KINDS)}")
    if kind == "light":
        yield from map(_light_case, sorted(_data_folder("light").glob("*.onnx")))
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the test generators divide by zero on purpose
        tests = loader.load_model_tests(kind=kind)
    for test in sorted(tests, key=lambda test: test.name):
        yield _backend_case(kind, test)


def holds_float32(model: onnx.ModelProto) -> bool:
    """Whether anything in the model has the type float32: a value, a weight, or the result of a node."""
    typed = _infer(model)
    return any(_value_holds(value.type) for value in _values(typed.graph)) or any(
        tensor.data_type == TensorProto.FLOAT for tensor in typed.graph.initializer
    )


def _infer(model: onnx.ModelProto) -> onnx.ModelProto:
    try:
        return onnx.shape_inference.infer_shapes(model)
    except (onnx.shape_inference.InferenceError, ValueError):
        return model


def _values(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    return [*graph.input, *graph.output, *graph.value_info]


def _value_holds(type_proto: onnx.TypeProto) -> bool:
    kind = type_proto.WhichOneof("value")
    if kind == "tensor_type":
        return type_proto.tensor_type.elem_type == TensorProto.FLOAT
    if kind == "sequence_type":
        return _value_holds(type_proto.sequence_type.elem_type)
    if kind == "optional_type":
        return _value_holds(type_proto.optional_type.elem_type)
    return False


def _backend_case(kind: str, test: Any) -> Case:
    if test.model is not None:
        model, data_sets = test.model, test.data_sets
    else:
        folder = Path(test.model_dir)
        model = onnx.load(folder / "model.onnx")
        data_sets = [_stored_data(part, model) for part in sorted(folder.glob("test_data_set_*"))]
    initialized = {tensor.name for tensor in model.graph.initializer}
    names = [value.name for value in model.graph.input if value.name not in initialized]
    return Case(
        kind=kind,
        name=test.name,
        model=model.SerializeToString(deterministic=True),
        inputs=tuple(dict(zip(names, map(_plain, inputs), strict=False)) for inputs, _ in data_sets),
        expected=tuple([_plain(value) for value in outputs] for _, outputs in data_sets),
        rtol=test.rtol,
        atol=test.atol,
    )


def _stored_data(folder: Path, model: onnx.ModelProto) -> tuple[list[Value], list[Value]]:
    initialized = {tensor.name for tensor in model.graph.initializer}
    wanted = [value for value in model.graph.input if value.name not in initialized]
    inputs = [_stored(folder / f"input_{i}.pb", value.type) for i, value in enumerate(wanted)]
    outputs = [_stored(folder / f"output_{i}.pb", value.type) for i, value in enumerate(model.graph.output)]
    return inputs, outputs


def _stored(file: Path, type_proto: onnx.TypeProto) -> Value:
    content = file.read_bytes()
    if type_proto.HasField("sequence_type"):
        return numpy_helper.to_list(onnx.SequenceProto.FromString(content))
    if type_proto.HasField("optional_type"):
        return numpy_helper.to_optional(onnx.OptionalProto.FromString(content))
    return numpy_helper.to_array(TensorProto.FromString(content))


def _plain(value: Value) -> Value:
    if isinstance(value, TensorProto):
        return numpy_helper.to_array(value)
    return np.asarray(value) if isinstance(value, np.generic) else value


def _light_case(file: Path) -> Case:
    model = onnx.load(file)
    initialized = {tensor.name for tensor in model.graph.initializer}
    inputs = {value.name: _ramp(value) for value in model.graph.input if value.name not in initialized}
    answer = numpy_helper.to_array(TensorProto.FromString(file.with_name(f"{file.stem}_output_0.pb").read_bytes()))
    return Case(
        kind="light", name=file.stem, model=file.read_bytes(), inputs=(inputs,), expected=([answer],), rtol=1e-3, atol=1e-5
    )


def _ramp(value: onnx.ValueInfoProto) -> Value:
    """The input that ONNX's own runner feeds the light models: 0 to 1 in equal steps."""
    shape = [dim.dim_value or 1 for dim in value.type.tensor_type.shape.dim]
    count = int(np.prod(shape))
    return (np.arange(count).reshape(shape) / count).astype(np.float32)


def _data_folder(kind: str) -> Path:
    return Path(loader.DATA_DIR) / kind
