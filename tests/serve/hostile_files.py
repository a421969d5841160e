"""Model files of an attacker: archives that run code when torch reads them, and ONNX files that would read other files."""

from __future__ import annotations

import io
import json
import pathlib
import pickle
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import AttributeProto, FunctionProto, NodeProto, TensorProto, helper, numpy_helper

from tests.serve.backends.torch_programs import BATCH, Mlp, save_program

SIZE = 16  # bytes of each tensor that lies elsewhere
HALF, BYTE = TensorProto.FLOAT16, TensorProto.UINT8


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, ...]]:
        return _touch, (str(self.marker),)


def _touch(name: str) -> dict[str, Any]:
    pathlib.Path(name).touch()
    return {}


def _saved(marker: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save((Payload(marker),), buffer)
    return buffer.getvalue()


def _pickled_in(kind: str, entry: str) -> Callable[[dict[str, bytes], Path], None]:
    """Say of a program's weights or constants that one is a pickle."""

    def change(entries: dict[str, bytes], marker: Path) -> None:
        listing = f"data/{kind}/model_{kind}_config.json"
        listed = json.loads(entries[listing])
        listed["config"]["first"] = {"path_name": entry, "is_param": False, "use_pickle": True, "tensor_meta": None}
        entries[listing] = json.dumps(listed).encode()
        entries[f"data/{kind}/{entry}"] = pickle.dumps(Payload(marker)) if entry.startswith("opaque") else _saved(marker)

    return change


def _in_example_inputs(entries: dict[str, bytes], marker: Path) -> None:
    entries["data/sample_inputs/model.pt"] = _saved(marker)


def _in_legacy_weights(entries: dict[str, bytes], marker: Path) -> None:
    entries["data/weights/model.pt"] = _saved(marker)


# Where torch 2.13 unpickles what `torch.export.load` reads.
PICKLES: dict[str, Callable[[dict[str, bytes], Path], None]] = {
    "example inputs": _in_example_inputs,
    "weights": _pickled_in("weights", "weight_9"),
    "constants": _pickled_in("constants", "tensor_9"),
    "weights of older versions": _in_legacy_weights,
    "an opaque constant": _pickled_in("constants", "opaque_obj_9"),
}


def save_hostile_archive(path: Path, place: str, marker: Path) -> Path:
    """Write a program that torch exported, with a pickle in one of the places `PICKLES` that creates the file `marker`."""
    entries = dict(_exported())
    PICKLES[place](entries, marker)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            archive.writestr(f"model/{name}", content)
    return path


@cache
def _exported() -> Mapping[str, bytes]:
    """What is in an archive that torch wrote."""
    with tempfile.TemporaryDirectory() as folder:
        inputs = torch.zeros(2, 64, dtype=torch.float16)
        program = save_program(Path(folder) / "model.pt2", Mlp(), inputs, dynamic_shapes=BATCH)
        with zipfile.ZipFile(program) as archive:
            return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def elsewhere(location: str, data_type: int = BYTE, count: int = SIZE) -> TensorProto:
    """A tensor whose bytes are the first ones of another file."""
    tensor = TensorProto(name="read", dims=[count], data_type=data_type, data_location=TensorProto.EXTERNAL)
    width = 1 if data_type == BYTE else 2 if data_type == HALF else 8
    for key, value in (("location", location), ("offset", "0"), ("length", str(width * count))):
        tensor.external_data.add(key=key, value=value)
    return tensor


def _sparse(location: str, data_type: int) -> onnx.SparseTensorProto:
    places = numpy_helper.from_array(np.arange(SIZE, dtype=np.int64))
    return helper.make_sparse_tensor(elsewhere(location, data_type), places, [SIZE])


def _with_places_elsewhere(location: str) -> onnx.SparseTensorProto:
    values = numpy_helper.from_array(np.ones(SIZE, np.float16), "read")
    return helper.make_sparse_tensor(values, elsewhere(location, TensorProto.INT64), [SIZE])


def _attribute(name: str, kind: int, **content: Any) -> AttributeProto:
    return AttributeProto(name=name, type=kind, **content)  # type: ignore[arg-type]  # a number is what the message holds


def _constant(attribute: AttributeProto, output: str = "read") -> NodeProto:
    return NodeProto(op_type="Constant", output=[output], attribute=[attribute])


def _value(location: str) -> AttributeProto:
    return _attribute("value", AttributeProto.TENSOR, t=elsewhere(location))


def _branches(location: str, *, as_constant: bool) -> list[NodeProto]:
    def body(name: str) -> onnx.GraphProto:
        output = [helper.make_tensor_value_info(f"out_{name}", BYTE, [SIZE])]
        if as_constant:
            return helper.make_graph([_constant(_value(location), f"out_{name}")], name, [], output)
        nodes = [helper.make_node("Identity", ["read"], [f"out_{name}"])]
        return helper.make_graph(nodes, name, [], output, [elsewhere(location)])

    return [
        helper.make_node("ReduceMax", ["x"], ["most"], keepdims=0),
        helper.make_node("Cast", ["most"], ["condition"], to=TensorProto.BOOL),
        helper.make_node("If", ["condition"], ["read_y"], then_branch=body("a"), else_branch=body("b")),
        helper.make_node("Identity", ["read_y"], ["y"]),
    ]


def _function(location: str, *, by_default: bool) -> FunctionProto:
    attribute = _value(location)
    if by_default:
        attribute = _attribute("value", AttributeProto.TENSOR, ref_attr_name="of_function")
    function = helper.make_function("own", "F", ["i"], ["read"], [_constant(attribute)], [helper.make_opsetid("", 20)])
    if by_default:
        function.attribute_proto.append(_attribute("of_function", AttributeProto.TENSOR, t=elsewhere(location)))
    return function


CALL, IDENTITY = helper.make_node("F", ["x"], ["y"], domain="own"), helper.make_node("Identity", ["read"], ["y"])
READERS: dict[str, Callable[[str], onnx.ModelProto]] = {
    "initializer": lambda at: _model([IDENTITY], initializer=[elsewhere(at)]),
    "sparse initializer": lambda at: _model([IDENTITY], sparse=[_sparse(at, BYTE)]),
    "sparse half initializer": lambda at: _model([IDENTITY], sparse=[_sparse(at, HALF)], kind=HALF),
    "places of a sparse initializer": lambda at: _model([IDENTITY], sparse=[_with_places_elsewhere(at)], kind=HALF),
    "constant": lambda at: _model([_constant(_value(at)), IDENTITY]),
    "sparse constant": lambda at: _model(
        [_constant(_attribute("sparse_value", AttributeProto.SPARSE_TENSOR, sparse_tensor=_sparse(at, HALF))), IDENTITY],
        kind=HALF,
    ),
    "list of tensors": lambda at: _model(
        [NodeProto(op_type="Identity", input=["x"], output=["y"], attribute=[_list(at)])], kind=HALF, size=1
    ),
    "initializer of a body": lambda at: _model(_branches(at, as_constant=False)),
    "constant of a body": lambda at: _model(_branches(at, as_constant=True)),
    "constant of a function": lambda at: _model([CALL], functions=[_function(at, by_default=False)]),
    "default of a function's attribute": lambda at: _model([CALL], functions=[_function(at, by_default=True)]),
    "training graph": lambda at: _model([helper.make_node("Identity", ["x"], ["y"])], training=at, kind=HALF, size=1),
}


def _list(location: str) -> AttributeProto:
    return _attribute("many", AttributeProto.TENSORS, tensors=[elsewhere(location)])


def _model(
    nodes: list[NodeProto],
    *,
    initializer: list[TensorProto] | None = None,
    sparse: list[onnx.SparseTensorProto] | None = None,
    functions: list[FunctionProto] | None = None,
    training: str = "",
    kind: int = BYTE,
    size: int = SIZE,
) -> onnx.ModelProto:
    """x FP16 [1] -> y [size], which is what was read."""
    inputs = [helper.make_tensor_value_info("x", HALF, [1])]
    outputs = [helper.make_tensor_value_info("y", kind, [size])]
    graph = helper.make_graph(nodes, "reader", inputs, outputs, initializer, sparse_initializer=sparse)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("own", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9, functions=functions)
    if training:
        model.training_info.add().algorithm.initializer.append(elsewhere(training))
    return model


def reading_model(place: str, location: str) -> bytes:
    """An fp16 model whose answer is 16 bytes of a file, by a tensor in one of the places `READERS`."""
    return READERS[place](location).SerializeToString()
