from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from serve.backends.onnx_runtime.border import set_border
from serve.engine.tensors import Array
from tests.models import save_mlp

FP16, FP32 = TensorProto.FLOAT16, TensorProto.FLOAT
EVERY_FP16 = np.arange(2**16, dtype=np.uint16).view(np.float16)


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
