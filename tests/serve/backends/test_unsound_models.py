"""Model files that protobuf can read and that are wrong all the same: each is refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper

from protos.model_config_pb2 import ModelConfig
from serve.backends.onnx_runtime.backend import OnnxRuntime
from serve.engine.backend import DevicePlacement
from serve.engine.errors import ModelLoadError
from serve.engine.tensors import ANY_SIZE
from tests.models import save_model
from tests.serve.backends.loading import load_backend

HALF = TensorProto.FLOAT16
ON_CPU = DevicePlacement(use_gpu=False, threads=1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """x FP16 [batch, 4] -> sum FP16 [batch, 4], with a weight of as many."""
    nodes = [helper.make_node("Add", ["x", "w"], ["sum"])]
    weights = {"w": np.ones(4, np.float16)}
    return save_model(tmp_path / "m.onnx", nodes, [("x", HALF, ["batch", 4])], [("sum", HALF, ["batch", 4])], weights)


def of_type_99(model: ModelProto) -> None:
    model.graph.input[0].type.tensor_type.elem_type = 99


def with_an_output_twice(model: ModelProto) -> None:
    model.graph.output.add().CopyFrom(model.graph.output[0])


def with_a_weight_in_pieces(model: ModelProto) -> None:
    model.graph.initializer[0].segment.end = 1


def with_a_weight_that_is_too_short(model: ModelProto) -> None:
    model.graph.initializer[0].dims[0] = 5


def with_a_constant_that_lies_nowhere(model: ModelProto) -> None:
    constant = TensorProto(data_type=HALF, dims=[4], data_location=TensorProto.EXTERNAL)
    model.graph.node.append(helper.make_node("Constant", [], ["c"], value=constant))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (of_type_99, "input 'x' has the type number 99, which cannot be served"),
        (with_an_output_twice, "output 'sum' is there twice, expected each once; export the model again"),
        (with_a_weight_in_pieces, r"is not a sound ONNX model \(.*segments"),
        (with_a_weight_that_is_too_short, r"is not a sound ONNX model \(cannot reshape array of size 4"),
        (with_a_constant_that_lies_nowhere, "keeps weights in '', expected a file beside it; export it again"),
    ],
)
def test_it_is_refused_in_one_line(path: Path, spoil: Callable[[ModelProto], None], message: str) -> None:
    model = onnx.load(path)
    spoil(model)
    path.write_bytes(model.SerializeToString())
    refused_in_one_line(path, message)


@pytest.mark.parametrize("name", [b"\n\x03sum", b"\x12\x05batch"], ids=["an output's name", "a dimension's name"])
def test_names_that_are_not_utf8_are_refused(path: Path, name: bytes) -> None:
    content = path.read_bytes()
    assert name in content
    path.write_bytes(content.replace(name, name[:-1] + b"\xff"))
    refused_in_one_line(path, "put has a name that is not UTF-8|is not a readable ONNX file")


def test_a_setting_that_onnx_runtime_does_not_take_is_refused(path: Path) -> None:
    config = ModelConfig()
    config.parameters["session." + "x" * 2000].string_value = "1"
    refused_in_one_line(path, "ONNX Runtime refuses the model: Config key is", config)


def test_what_the_server_has_the_runtime_record_is_recorded_whatever_a_config_says(path: Path) -> None:
    config = ModelConfig()
    config.parameters["session.record_ep_graph_assignment_info"].string_value = "0"
    load_backend(path, ON_CPU, config)
    assert config.parameters["halfserve.nodes"].string_value.startswith("CPUExecutionProvider=")


def test_a_negative_size_is_any_size(path: Path) -> None:
    model = onnx.load(path)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = -(2**63)
    path.write_bytes(model.SerializeToString())
    interface = OnnxRuntime().describe(path)
    assert (interface.inputs[0].shape, interface.outputs[0].shape) == ((ANY_SIZE, 4), (ANY_SIZE, 4))
    assert load_backend(path, ON_CPU).run({"x": np.zeros((3, 4), np.float16)})["sum"].shape == (3, 4)


def refused_in_one_line(path: Path, message: str, config: ModelConfig | None = None) -> None:
    with pytest.raises(ModelLoadError, match=message) as refused:
        load_backend(path, ON_CPU, config)
    assert "\n" not in str(refused.value)
