from __future__ import annotations

import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from halfserve.files import onnx_outline
from halfserve.serve.backends.onnx_runtime import onnx_file, onnx_preparation
from halfserve.serve.backends.onnx_runtime.onnx_preparation import PreparedModel, prepared, set_border
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.tensors import Array
from tests.models import save_mlp, save_model

X = np.random.default_rng(4).standard_normal((3, 64)).astype(np.float16)
FP16, FP32 = TensorProto.FLOAT16, TensorProto.FLOAT
EVERY_FP16 = np.arange(2**16, dtype=np.uint16).view(np.float16)


@pytest.fixture(params=["left in the file", "in the message"])
def moving(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of a few bytes count as large, and are where they are."""
    for module in (onnx_file, onnx_outline):
        monkeypatch.setattr(module, "LARGE_BYTES", 100)
    monkeypatch.setattr(onnx_file, "SMALL_FILE_BYTES", 0 if request.param == "left in the file" else 1 << 20)
    monkeypatch.setattr(onnx_preparation, "INLINE_BYTES", 100)


def answer(model: PreparedModel, x: Array = X) -> Array:
    session = ort.InferenceSession(model.source, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {next(iter(model.given_names.values()), "x"): x})[0])


def inline_answer(path: Path) -> Array:
    with prepared(path, for_gpu=False) as model:
        assert isinstance(model.source, bytes)
        return answer(model)


@pytest.fixture
def mlp(tmp_path: Path) -> tuple[Path, Array]:
    """A model, and its answer from weights in the message."""
    path = save_mlp(tmp_path / "m.onnx")
    return path, inline_answer(path)


@pytest.mark.usefixtures("mlp", "moving")
def test_weights_in_a_file_give_the_same_answers(mlp: tuple[Path, Array]) -> None:
    path, expected = mlp
    with prepared(path, for_gpu=False) as model:
        assert isinstance(model.source, str)
        folder = Path(model.source).parent
        moved = onnx.load(model.source, load_external_data=False).graph.initializer
        assert [(t.data_type, t.data_location) for t in moved] == [(TensorProto.FLOAT, TensorProto.EXTERNAL)] * 2
        assert model.precision == "fp32 (the fp16 model, upcast)"
        np.testing.assert_array_equal(answer(model), expected, strict=True)
    assert not folder.exists()


@pytest.mark.usefixtures("mlp", "moving")
def test_weights_beside_the_file_and_in_it_give_the_same_answers(mlp: tuple[Path, Array]) -> None:
    path, expected = mlp
    model = onnx.load(path)
    first = model.graph.initializer[0]
    (path.parent / "beside.bin").write_bytes(first.raw_data)
    first.ClearField("raw_data")
    first.data_location = TensorProto.EXTERNAL
    first.external_data.add(key="location", value="beside.bin")
    path.write_bytes(model.SerializeToString())
    with prepared(path, for_gpu=False) as model_in_files:
        assert isinstance(model_in_files.source, str)
        np.testing.assert_array_equal(answer(model_in_files), expected, strict=True)


@pytest.mark.usefixtures("moving")
def test_a_session_outlives_the_file_of_its_weights(tmp_path: Path) -> None:
    path = save_mlp(tmp_path / "m.onnx")
    with prepared(path, for_gpu=False) as model:
        session = ort.InferenceSession(model.source, providers=["CPUExecutionProvider"])
        before = session.run(None, {"x/given": X})[0]
    np.testing.assert_array_equal(session.run(None, {"x/given": X})[0], before)


@pytest.mark.usefixtures("moving")
def test_weights_of_other_types_are_moved_as_they_are(tmp_path: Path) -> None:
    table, places = np.arange(200, dtype=np.int64), np.arange(64, dtype=np.float32)
    nodes = [
        helper.make_node("Cast", ["x"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["f", "places"], ["s"]),
        helper.make_node("ReduceSum", ["table"], ["t"], keepdims=0),
        helper.make_node("Cast", ["t"], ["tf"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["s", "tf"], ["y"]),
    ]
    inputs: list[tuple[str, int, list[int | str]]] = [("x", TensorProto.FLOAT16, ["batch", 64])]
    outputs: list[tuple[str, int, list[int | str]]] = [("y", TensorProto.FLOAT, ["batch", 64])]
    path = save_model(tmp_path / "m.onnx", nodes, inputs, outputs, {"table": table, "places": places})
    with prepared(path, for_gpu=False) as model:
        np.testing.assert_allclose(answer(model), X.astype(np.float32) + places + table.sum(), rtol=1e-6)


@pytest.mark.usefixtures("moving")
def test_on_a_gpu_bf16_weights_stay_bf16_and_the_border_is_fp32(tmp_path: Path) -> None:
    bf16 = TensorProto.BFLOAT16
    nodes = [helper.make_node("Add", ["x", "w"], ["y"])]
    path, weights = tmp_path / "m.onnx", {"w": np.ones(64, ml_dtypes.bfloat16)}
    save_model(path, nodes, [("x", bf16, ["batch", 64])], [("y", bf16, ["batch", 64])], weights)
    with prepared(path, for_gpu=True) as model:
        assert (model.precision, dict(model.given_names)) == ("bf16", {"x": "x/given"})
        read = onnx.load(str(model.source))
        assert [t.data_type for t in read.graph.initializer] == [bf16]
        assert {v.type.tensor_type.elem_type for v in (*read.graph.input, *read.graph.output)} == {TensorProto.FLOAT}
        onnx.checker.check_model(read, full_check=True)


@pytest.mark.usefixtures("moving")
def test_without_a_temporary_folder_the_weights_stay_in_the_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_mlp(tmp_path / "m.onnx")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    assert inline_answer(path).shape == (3, 10)
    monkeypatch.setattr(onnx_preparation, "MAX_MESSAGE_BYTES", 100)
    with pytest.raises(ModelLoadError, match=r"m.onnx: needs a temporary folder .*; set TMPDIR"), prepared(path, for_gpu=False):
        pass


@pytest.mark.usefixtures("moving")
def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    path = save_mlp(tmp_path / "m.onnx")
    monkeypatch.setattr(onnx_preparation, "move_weights", full)
    message = r"its weights could not be written to .* \(No space left on device\); set TMPDIR to a folder with room"
    with pytest.raises(ModelLoadError, match=message), prepared(path, for_gpu=False):
        pass


def run(model: onnx.ModelProto, **feeds: Array) -> list[object]:
    onnx.checker.check_model(model, full_check=True)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


def passing_on(*, inner: int = FP32) -> onnx.ModelProto:
    """x -> y, and x itself as an output too."""
    values = {name: helper.make_tensor_value_info(name, inner, ["n"]) for name in "xy"}
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [values["x"]], [values["y"], values["x"]])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def test_every_fp16_number_passes_through_fp32_unchanged() -> None:
    model = passing_on()
    assert set_border(model, {"x": FP16, "y": FP16}) == {"x": "x/given"}
    for answer in run(model, **{"x/given": EVERY_FP16}):
        np.testing.assert_array_equal(answer, EVERY_FP16, strict=True)


def test_the_runtime_rounds_to_fp16_as_numpy_does() -> None:
    model = passing_on()
    set_border(model, {"y": FP16})
    random = np.random.default_rng(3)
    x = (random.standard_normal(100_000) * 2.0 ** random.integers(-30, 20, 100_000)).astype(np.float32)
    x[:6] = [65519.0, 65520.0, -65520.0, np.inf, np.nan, 2.0**-25]
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
    (y, _) = run(model, x=x)
    np.testing.assert_array_equal(y, expected, strict=True)


def test_a_border_that_is_already_so_changes_nothing() -> None:
    model = passing_on()
    before = model.SerializeToString(deterministic=True)
    assert set_border(model, {"x": FP32}) == {}
    assert model.SerializeToString(deterministic=True) == before


def test_weights_that_are_listed_among_the_inputs_keep_their_type(tmp_path: Path) -> None:
    model = onnx.load(save_mlp(tmp_path / "m.onnx"))
    model.graph.input.append(helper.make_tensor_value_info("w1", FP16, [64, 32]))
    assert set_border(model, {"x": FP32, "w1": FP32, "y": FP32}) == {"x": "x/given"}
    (y,) = run(model, **{"x/given": np.ones((2, 64), np.float32)})
    assert np.asarray(y).dtype == np.float32
