from __future__ import annotations

import onnx
import pytest
from google.protobuf import text_format

from halfserve.export.export_errors import ExportError
from halfserve.export.repository.config_file import config_for, padding_text, read_config, require_agreement, write_config
from halfserve.export.tasks.task import Task
from halfserve.protos.model_config_pb2 import TYPE_FP16, ModelConfig
from tests.export.stored_models import chain


def test_it_describes_the_model_without_its_batch(model: onnx.ModelProto) -> None:
    config = read_config(write_config(config_for("m", model, max_batch_size=8)), "config.pbtxt")
    assert (config.name, config.platform, config.max_batch_size) == ("m", "onnxruntime_onnx", 8)
    assert [(t.name, t.data_type, list(t.dims)) for t in config.input] == [("x", TYPE_FP16, [1])]
    assert [(t.name, t.data_type, list(t.dims)) for t in config.output] == [("y", TYPE_FP16, [1])]
    assert config.HasField("dynamic_batching")


def test_without_batching_dims_are_whole_shapes(model: onnx.ModelProto) -> None:
    config = config_for("m", model, max_batch_size=0)
    assert list(config.input[0].dims) == [-1, 1]
    assert not config.HasField("dynamic_batching")


def test_initializers_that_are_also_inputs_are_not_asked_for(model: onnx.ModelProto) -> None:
    model.graph.input.append(onnx.helper.make_tensor_value_info("c", onnx.TensorProto.FLOAT16, [1]))
    assert [tensor.name for tensor in config_for("m", model, max_batch_size=8).input] == ["x"]


def test_a_tensor_that_is_only_a_batch_is_reshaped(scalar_model: onnx.ModelProto) -> None:
    entry = config_for("m", scalar_model, max_batch_size=8).input[0]
    assert (list(entry.dims), entry.HasField("reshape"), list(entry.reshape.shape)) == ([1], True, [])


def test_a_single_number_is_a_tensor_of_one_without_a_reshape(scalar_model: onnx.ModelProto) -> None:
    for value in (*scalar_model.graph.input, *scalar_model.graph.output):
        del value.type.tensor_type.shape.dim[:]
    config = config_for("m", scalar_model, max_batch_size=0)
    for number in (config.input[0], config.output[0]):
        assert (list(number.dims), number.HasField("reshape")) == ([1], False)


def test_a_fixed_batch_needs_no_batching() -> None:
    with pytest.raises(ExportError, match=r"'x' has shape \[4, 1\], without a variable batch .* use --max-batch-size 0"):
        config_for("m", chain(["Mul"], 1.0, batch=4), max_batch_size=8)


def test_a_type_without_a_name_on_the_wire_is_refused(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.COMPLEX64
    with pytest.raises(ExportError, match="'x' has no known rank and type"):
        config_for("m", model, max_batch_size=8)


def edited(text: str) -> ModelConfig:
    return text_format.Parse(text, ModelConfig())


@pytest.mark.parametrize(
    "text",
    ["max_batch_size: 4", 'name: "m" max_batch_size: 99', 'max_batch_size: 1 input { name: "x" data_type: TYPE_FP16 dims: 1 }'],
)
def test_what_a_user_left_out_or_tuned_is_no_contradiction(text: str, model: onnx.ModelProto) -> None:
    existing, before = edited(text), edited(text)
    require_agreement(existing, config_for("m", model, max_batch_size=8), "config.pbtxt")
    assert existing == before, "and nothing is changed"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('name: "other"', "config.pbtxt says name 'other', this model needs 'm'"),
        ('platform: "tensorrt_plan"', "says platform 'tensorrt_plan', this model needs 'onnxruntime_onnx'"),
        ("max_batch_size: 0", "says max_batch_size 0, this model 8"),
        (
            'max_batch_size: 8 input { name: "x" data_type: TYPE_FP32 dims: 1 }',
            r"says input 'x' is TYPE_FP32 \[1\], the model has TYPE_FP16 \[1\]",
        ),
        ('max_batch_size: 8 output { name: "z" data_type: TYPE_FP16 dims: 1 }', "output 'z' is .*, the model's are y"),
    ],
)
def test_contradictions_are_named(text: str, message: str, model: onnx.ModelProto) -> None:
    with pytest.raises(ExportError, match=message):
        require_agreement(edited(text), config_for("m", model, max_batch_size=8), "config.pbtxt")


def test_a_missing_input_is_named() -> None:
    wanted = edited('name: "m" input { name: "a" } input { name: "b" }')
    with pytest.raises(ExportError, match="lacks the input 'b' of this model"):
        require_agreement(edited('input { name: "a" }'), wanted, "config.pbtxt")


@pytest.mark.parametrize("content", [b"name: 3", b"nme: 'm'", b"\xff"])
def test_what_is_no_configuration_is_refused(content: bytes) -> None:
    with pytest.raises(ExportError, match="config.pbtxt is no model configuration: .* mend it or remove it"):
        read_config(content, "config.pbtxt")


@pytest.mark.parametrize(
    ("task", "batch", "expected"),
    [
        (Task(name="embeddings", padding={"ids": 1, "mask": 0}), 8, "ids[1]=1 mask[1]=0"),
        (Task(name="tags", padding={"ids": 1, "mask": 0}, per_token=True), 8, "ids[1]=1 mask[1]=0 -> y[1]"),
        (Task(name="tags", per_token=True), 8, ""),
        (Task(name="embeddings", padding={"ids": 1, "mask": 0}), 0, ""),
    ],
)
def test_padding_is_written_as_the_server_reads_it(task: Task, batch: int, expected: str) -> None:
    config = ModelConfig(max_batch_size=batch)
    config.output.add(name="y")
    assert padding_text(config, task) == expected
