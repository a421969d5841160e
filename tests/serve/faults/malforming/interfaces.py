"""The models that malformed messages are sent to, with their inputs, outputs and answers, and valid requests for them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from halfserve.protos.inference_pb2 import ModelInferRequest

Array = np.ndarray[Any, Any]
Answers = Callable[[Mapping[str, Array]], dict[str, Array]]
MAX_BATCH = 16
ONNX_TYPES = {
    "FP16": TensorProto.FLOAT16,
    "INT32": TensorProto.INT32,
    "BOOL": TensorProto.BOOL,
    "BYTES": TensorProto.STRING,
}


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A model as its clients see it.

    Attributes:
        inputs: (datatype, shape) by name; the first dimension is the batch, -1 takes any size.
    """

    inputs: Mapping[str, tuple[str, tuple[int, ...]]]
    outputs: Mapping[str, str]  # datatypes by name, in the model's order
    answer: Answers  # computes the outputs for valid inputs


def _affine(x: Mapping[str, Array]) -> dict[str, Array]:
    with np.errstate(all="ignore"):  # inputs may contain any bits, also NaN and infinities
        return {"y": (2 * x["x"].astype(np.float32) + 1).astype(np.float16)}


INTERFACES: Mapping[str, Interface] = {
    "affine": Interface(inputs={"x": ("FP16", (-1, 8))}, outputs={"y": "FP16"}, answer=_affine),
    "flip": Interface(inputs={"x": ("FP16", (-1, -1))}, outputs={"y": "FP16"}, answer=lambda x: {"y": -x["x"]}),
    "mixed": Interface(
        inputs={"flag": ("BOOL", (-1, 2)), "number": ("INT32", (-1, -1)), "text": ("BYTES", (-1, 1))},
        outputs={"not_flag": "BOOL", "same_number": "INT32", "same_text": "BYTES"},
        answer=lambda x: {"not_flag": ~x["flag"], "same_number": x["number"], "same_text": x["text"]},
    ),
}
NODES = {
    "affine": [helper.make_node("Mul", ["x", "two"], ["double"]), helper.make_node("Add", ["double", "one"], ["y"])],
    "flip": [helper.make_node("Neg", ["x"], ["y"])],
    "mixed": [
        helper.make_node("Not", ["flag"], ["not_flag"]),
        helper.make_node("Identity", ["number"], ["same_number"]),
        helper.make_node("Identity", ["text"], ["same_text"]),
    ],
}
WEIGHTS = {"affine": {"one": np.array(1, np.float16), "two": np.array(2, np.float16)}}


def save_interfaces(repository: Path) -> None:
    """Write a model for each of them, version 1."""
    for name, interface in INTERFACES.items():
        inputs = [_value(name, key, wire, shape) for key, (wire, shape) in interface.inputs.items()]
        shapes = dict(zip(interface.outputs, (shape for _, shape in interface.inputs.values()), strict=True))
        outputs = [_value(name, key, wire, shapes[key]) for key, wire in interface.outputs.items()]
        weights = [numpy_helper.from_array(value, key) for key, value in WEIGHTS.get(name, {}).items()]
        graph = helper.make_graph(NODES[name], name, inputs, outputs, weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        onnx.checker.check_model(model, full_check=True)
        (repository / name / "1").mkdir(parents=True)
        onnx.save(model, repository / name / "1" / "model.onnx")
        (repository / name / "config.pbtxt").write_text(f"max_batch_size: {MAX_BATCH}")


def _value(model: str, name: str, wire: str, shape: tuple[int, ...]) -> onnx.ValueInfoProto:
    sizes = ["batch" if place == 0 else f"{model}_{place}" if size < 0 else size for place, size in enumerate(shape)]
    return helper.make_tensor_value_info(name, ONNX_TYPES[wire], sizes)


def seeded(seed: int) -> random.Random:
    """A generator that makes the same choices for the same seed."""
    return random.Random(seed)  # noqa: S311  (what is tested with need not be hard to guess)


def good_request(chance: random.Random) -> ModelInferRequest:
    name = chance.choice(list(INTERFACES))
    rows = chance.randint(1, MAX_BATCH)
    request = ModelInferRequest(model_name=name, id=chance.choice(["", "17", "request-\u00e9"]))
    if chance.random() < 0.3:
        request.model_version = "1"
    if name == "mixed":
        columns = chance.randint(0, 4)
        request.inputs.add(name="flag", datatype="BOOL", shape=[rows, 2])
        request.inputs.add(name="number", datatype="INT32", shape=[rows, columns])
        request.inputs.add(name="text", datatype="BYTES", shape=[rows, 1])
        texts = [b"x" * chance.randint(0, 5) for _ in range(rows)]
        packed = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
        request.raw_input_contents.extend([chance.randbytes(2 * rows), chance.randbytes(4 * rows * columns), packed])
        return request
    columns = 8 if name == "affine" else chance.choice([1, 3, 64])
    request.inputs.add(name="x", datatype="FP16", shape=[rows, columns])
    request.raw_input_contents.append(chance.randbytes(2 * rows * columns))
    if chance.random() < 0.2:
        request.outputs.add(name="y")
    return request
