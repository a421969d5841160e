from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from halfserve.protos.datatypes import BY_WIRE
from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.engine.backend import ModelInterface
from halfserve.serve.engine.config.batching import batch_limits
from halfserve.serve.engine.config.model_config import Defaults, client_interface, complete_config, read_config
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.tensors import TensorSpec

BATCHED = ModelInterface(
    inputs=(TensorSpec(name="x", datatype=BY_WIRE["FP16"], shape=(-1, 3, -1)),),
    outputs=(TensorSpec(name="y", datatype=BY_WIRE["FP32"], shape=(-1, 10)),),
    batched=True,
)
FIXED = ModelInterface(inputs=BATCHED.inputs, outputs=BATCHED.outputs, batched=False)


def complete(tmp_path: Path, text: str | None, interface: ModelInterface = BATCHED) -> ModelConfig:
    path = tmp_path / "config.pbtxt"
    if text is not None:
        path.write_text(text)
    return complete_config(read_config(path), interface, name="m", defaults=Defaults(max_batch_size=16, max_queue_delay_us=250))


def test_differently_named_first_dimensions_are_a_batch_if_declared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    several = replace(BATCHED, row_names=frozenset({"batch", "detections"}))
    assert complete(tmp_path, None, several).max_batch_size == 0
    assert "are called 'batch', 'detections', so requests are computed one by one" in caplog.text
    caplog.clear()
    assert complete(tmp_path, "max_batch_size: 8", several).max_batch_size == 8
    assert complete(tmp_path / "none", None, replace(BATCHED, row_names=frozenset({"batch"}))).max_batch_size == 16
    assert not caplog.text


def test_without_a_file_everything_comes_from_the_model(tmp_path: Path) -> None:
    config = complete(tmp_path, None)
    assert (config.name, config.platform, config.backend, config.max_batch_size) == ("m", "onnxruntime_onnx", "onnxruntime", 16)
    assert [(t.name, t.data_type, list(t.dims)) for t in config.input] == [("x", 10, [3, -1])]
    assert [(t.name, t.data_type, list(t.dims)) for t in config.output] == [("y", 11, [10])]
    assert batch_limits(config, Defaults()).max_delay_s == 250e-6


def test_declared_settings_are_kept(tmp_path: Path) -> None:
    config = complete(
        tmp_path,
        """max_batch_size: 8 input [{name: "x" data_type: TYPE_FP16 dims: [3, 5]}]
        dynamic_batching { preferred_batch_size: [4] max_queue_delay_microseconds: 7
          default_queue_policy { max_queue_size: 9 } }
        parameters { key: "team" value { string_value: "vision" } }""",
    )
    limits = batch_limits(config, Defaults())
    assert (limits.max_rows, limits.max_delay_s, limits.preferred_rows, limits.max_waiting) == (8, 7e-6, (4,), 9)
    assert list(config.input[0].dims) == [3, 5]
    assert config.parameters["team"].string_value == "vision"


def test_a_written_zero_is_no_batching_and_a_missing_one_is_the_default(tmp_path: Path) -> None:
    assert complete(tmp_path, "max_batch_size: 0").max_batch_size == 0
    assert complete(tmp_path, 'name: "m"').max_batch_size == 16
    assert complete(tmp_path, 'name: "m"', FIXED).max_batch_size == 0
    assert complete(tmp_path, '# max_batch_size: 0\nparameters { key: "max_batch_size: 0" }').max_batch_size == 16
    unbatched = complete(tmp_path, "max_batch_size: 0")
    assert list(unbatched.input[0].dims) == [-1, 3, -1]
    assert batch_limits(unbatched, Defaults()).max_rows == 1


@pytest.mark.parametrize("rows", [-1, 4])
def test_dims_with_the_batch_and_no_batch_size_are_no_batching(tmp_path: Path, rows: int) -> None:
    dims = f"input [{{ name: 'x' data_type: TYPE_FP16 dims: [{rows}, 3, -1] }}]"
    config = complete(tmp_path, dims)
    assert (config.max_batch_size, config.HasField("dynamic_batching")) == (0, False)
    assert (list(config.input[0].dims), list(config.output[0].dims)) == ([rows, 3, -1], [-1, 10])
    assert client_interface(config, BATCHED).inputs[0].shape == (rows, 3, -1)
    with pytest.raises(ModelLoadError, match="without the batch dimension"):
        complete(tmp_path, f"max_batch_size: 8 {dims}")


@pytest.mark.parametrize("before", ["", 'name: "m" ', 'parameters { key: "a" } ', "version_policy { all {} }, "])
@pytest.mark.parametrize(("written", "size"), [("max_batch_size: 8", 8), ("max_batch_size: 0", 0), ("max_batch_size : 0x0", 0)])
def test_max_batch_size_is_read_anywhere_in_the_file(tmp_path: Path, before: str, written: str, size: int) -> None:
    assert complete(tmp_path, before + written).max_batch_size == size


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_batch_size: many", r"config.pbtxt: 1:17 : .*expected a ModelConfig"),
        ("max_batchsize: 4", "config.pbtxt, line 1: unknown field 'max_batchsize'; did you mean 'max_batch_size'?"),
        (
            "max_batch_size: 4\ninstance_group [\n  { kind: KIND_CPU },\n  { cuont: 1 }\n]",
            "config.pbtxt, line 4: unknown field 'cuont' of ModelInstanceGroup; did you mean 'count'?",
        ),
        (
            "dynamic_batching { priority_queue_policy { key: 1 value { zzz: 1 } } }",
            "config.pbtxt, line 1: unknown field 'zzz' of ModelQueuePolicy; known are timeout_action, default_timeout_",
        ),
        (
            "max_queue_delay_microseconds: 100",
            "'max_queue_delay_microseconds' is no field, but one of 'dynamic_batching'; write dynamic_batching { max_",
        ),
        ("max_batch_size: -1", "max_batch_size is -1, expected 0"),
        ('name: "other"', "name is 'other', expected the folder's name 'm'"),
        ('platform: "tensorflow_savedmodel"', "'tensorflow_savedmodel' models are not supported, expected platform"),
        ('max_batch_size: 4 input [{name: "q"}]', "input 'q' is not in the model, which has 'x'"),
        (
            'input [{name: "x" data_type: TYPE_INT8 dims: [9]}, {name: "x" data_type: TYPE_FP16 dims: [3, -1]}]',
            "config.pbtxt: input 'x' is there twice, expected each once; remove one",
        ),
        (
            'max_batch_size: 4 input [{name: "x" data_type: TYPE_FP32 dims: [3, -1]}]',
            "'x' has TYPE_FP32, the model has TYPE_FP16",
        ),
        ('max_batch_size: 4 input [{name: "x" dims: [3, -1]}]', "'x' has TYPE_INVALID|no data_type, the model has TYPE_FP16"),
        (
            'max_batch_size: 4 output [{name: "y" data_type: TYPE_FP32 dims: [11]}]',
            r"'y' has dims \[11\], the model has \[10\]",
        ),
        ('max_batch_size: 4 output [{name: "y" data_type: TYPE_FP32 dims: [-1, 10]}]', "dims are without the batch dimension"),
        (
            'max_batch_size: 4 input [{name: "x" data_type: TYPE_FP16 dims: [3, -5]}]',
            r"input 'x' has dims \[3, -5\], expected sizes of 0 or more, or -1 for any size",
        ),
        (
            'max_batch_size: 4 input [{name: "x" data_type: TYPE_FP16 dims: [-2, -2] reshape {shape: [4]}}]',
            r"input 'x' has dims \[-2, -2\], expected sizes of 0 or more",
        ),
    ],
)
def test_contradictions_to_the_model_are_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message) as refused:
        complete(tmp_path, text)
    assert "\n" not in str(refused.value)
    assert "config.pbtxt" in str(refused.value)


def test_batching_needs_a_batch_dimension(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="export it with a dynamic batch dimension or set max_batch_size: 0"):
        complete(tmp_path, "max_batch_size: 4", FIXED)


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.pbtxt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelLoadError, match="config.pbtxt: cannot be read"):
        read_config(tmp_path / "config.pbtxt")


SCALARS = ModelInterface(
    inputs=(TensorSpec(name="x", datatype=BY_WIRE["FP32"], shape=(-1,)),),
    outputs=(TensorSpec(name="y", datatype=BY_WIRE["FP32"], shape=(-1, 2, 3)),),
    batched=True,
)


def test_clients_see_what_the_config_shows(tmp_path: Path) -> None:
    text = """max_batch_size: 4 input [{name: "x" data_type: TYPE_FP32 dims: [1] reshape {}}]
      output [{name: "y" data_type: TYPE_FP32 dims: [6] reshape {shape: [2, 3]}}]"""
    shown = client_interface(complete(tmp_path, text, SCALARS), SCALARS)
    assert (shown.inputs[0].shape, shown.inputs[0].model_shape) == ((-1, 1), (-1,))
    assert shown.inputs[0].to_model(np.zeros((3, 1))).shape == (3,)
    assert shown.outputs[0].to_client(np.zeros((3, 2, 3))).shape == (3, 6)
    narrowed = client_interface(
        complete(tmp_path, 'max_batch_size: 8 input [{name: "x" data_type: TYPE_FP16 dims: [3, 5]}]'), BATCHED
    )
    assert narrowed.inputs[0].shape == (-1, 3, 5)
    assert narrowed.outputs[0].shape == (-1, 10)


def test_a_reshape_keeps_the_open_sizes_in_their_order(tmp_path: Path) -> None:
    model = replace(SCALARS, inputs=(TensorSpec(name="x", datatype=BY_WIRE["FP32"], shape=(-1, 8, -1, 1, -1)),))
    text = 'max_batch_size: 4 input [{name: "x" data_type: TYPE_FP32 dims: [2, 4, -1, -1] reshape {shape: [8, -1, 1, -1]}}]'
    (shown,) = client_interface(complete(tmp_path, text, model), model).inputs
    assert shown.shape == (-1, 2, 4, -1, -1)
    assert shown.mismatch([3, 2, 4, 5, 6]) is None
    assert shown.shape_for_model((3, 2, 4, 5, 6)) == (3, 8, 5, 1, 6)
    assert shown.to_model(np.zeros((3, 2, 4, 5, 6))).shape == (3, 8, 5, 1, 6)
    assert shown.to_client(np.zeros((3, 8, 5, 1, 6))).shape == (3, 2, 4, 5, 6)


def test_sizes_that_the_model_fixes_stay_fixed(tmp_path: Path) -> None:
    text = """max_batch_size: 4 input [{name: "x" data_type: TYPE_FP16 dims: [-1, -1]}]
      output [{name: "y" data_type: TYPE_FP32 dims: [-1]}]"""
    config = complete(tmp_path, text)
    assert (list(config.input[0].dims), list(config.output[0].dims)) == ([3, -1], [10])
    assert client_interface(config, BATCHED).inputs[0].mismatch([1, 4, 5]) == (
        "has shape [1, 4, 5], expected [-1, 3, -1] (-1 takes any size)"
    )


@pytest.mark.parametrize("ones", ["[1]", "[1, 1]"])
def test_a_single_number_may_be_declared_as_a_tensor_of_one(tmp_path: Path, ones: str) -> None:
    number = replace(FIXED, inputs=(TensorSpec(name="x", datatype=BY_WIRE["INT64"], shape=()),))
    config = complete(tmp_path, f"input [{{ name: 'x' data_type: TYPE_INT64 dims: {ones} }}]", number)
    assert not config.input[0].HasField("reshape")  # Triton refuses one to no dims
    (shown,) = client_interface(config, number).inputs
    assert list(shown.shape) == [1] * ones.count("1")
    assert shown.to_model(np.zeros(shown.shape)).shape == ()
    assert shown.to_client(np.zeros(())).shape == shown.shape
    with pytest.raises(ModelLoadError, match=r"'x' has dims \[2\], the model has \[\]"):
        complete(tmp_path, "input [{ name: 'x' data_type: TYPE_INT64 dims: [2] }]", number)


@pytest.mark.parametrize(
    "sizes",
    [
        "dims: [1] reshape {shape: [2]}",
        "dims: [1] reshape {shape: [-1]}",
        "dims: [0] reshape {shape: [0]}",
        "dims: [4] reshape {shape: [-2, -2]}",
        "dims: [2, -1, 3] reshape {shape: [3, -1, 2]}",
        "dims: [-1, -1] reshape {shape: [-1]}",
    ],
)
def test_a_reshape_that_changes_the_count_is_refused(tmp_path: Path, sizes: str) -> None:
    text = f'max_batch_size: 4 input [{{name: "x" data_type: TYPE_FP32 {sizes}}}]'
    with pytest.raises(ModelLoadError, match="expected sizes of 1 or more, equally many"):
        complete(tmp_path, text, SCALARS)
