"""Models that compute in float64 are converted through float32, or refused: no file of them is called float16 unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import pytest
from onnx import TensorProto

from halfserve.export.conversion_settings import ConversionSettings
from halfserve.export.export_errors import ExportError
from halfserve.export.onnx_files.model_file import open_model
from halfserve.export.onnx_fp16.convert import convert, convert_file, convert_float_to_float16
from tests.export.onnx_fp16.models import halve, ops, run, types
from tests.export.stored_models import in_one_file, parse, sums, with_data_files

X = np.random.default_rng(0).normal(size=(3, 4))
WHOLE = "g (double[n,4] x) => (double[n,4] y) { a = Mul (x, w) e = Exp (a) y = Tanh (e) }"


def in_float64(text: str, **weights: Any) -> onnx.ModelProto:
    model = parse(text)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.array(value), name) for name, value in weights.items())
    return model


@pytest.mark.parametrize("repair", [True, False])
@pytest.mark.parametrize(("keep", "kind"), [(True, TensorProto.DOUBLE), (False, TensorProto.FLOAT16)])
def test_a_float64_model_computes_in_float16(keep: bool, kind: int, repair: bool) -> None:
    model = in_float64(WHOLE, w=[1.0, 0.5, -1.0, 2.0])
    converted, report = halve(model, keep_io_types=keep, repair=repair)
    onnx.checker.check_model(converted, full_check=True)
    assert (report.float_nodes, report.fp16_nodes) == (3, 3)
    assert [(repair.pass_name, repair.nodes, repair.text) for repair in report.repairs] == [
        ("narrow-float64", ("a", "e", "y"), "computed in float64; converted through float32")
    ]
    known = types(converted)
    assert (known["x"], known["y"], known["w"]) == (kind, kind, TensorProto.FLOAT16)
    assert ops(converted) == (["Cast", "Mul", "Exp", "Tanh", "Cast"] if keep else ["Mul", "Exp", "Tanh"])
    (before,), (after,) = run(model, x=X), run(converted, x=X if keep else X.astype(np.float16))
    np.testing.assert_allclose(after, before, atol=2e-3)
    assert halve(converted, keep_io_types=keep, repair=repair)[1].converted_before


def test_what_float32_does_not_hold_stays_finite_and_not_zero() -> None:
    """A mask of the lowest float64 is no infinity, and an epsilon below float32 divides by no zero."""
    text = "g (double[2] x) => (double[2] y) { m = Add (x, mask) s = Softmax (m) d = Add (s, tiny) y = Div (s, d) }"
    model = in_float64(text, mask=[0.0, np.finfo(np.float64).min], tiny=[1e-300])
    converted = convert_float_to_float16(model)
    np.testing.assert_allclose(run(converted, x=np.ones(2))[0], [1.0, 0.0], atol=1e-3)


def test_bodies_constants_and_makers_are_converted() -> None:
    model = in_float64(
        """g (bool c, double[2] x) => (double[2] y) {
        half = Constant <value = double[2] {0.5, 0.25}> () s = Shape (x) f = ConstantOfShape <value = double[1] {2.0}> (s)
        b = If (c) <then_branch = t () => (double[2] p) { p = Mul (x, half) }, else_branch = e () => (double[2] q) {
        z = Cast <to = 11> (c) q = Add (f, z) }> y = Neg (b) }"""
    )
    converted, report = halve(model)
    onnx.checker.check_model(converted, full_check=True)
    assert report.float_nodes == report.fp16_nodes
    for chosen in (True, False):
        feeds = {"c": np.array(chosen), "x": np.array([1.0, 3.0])}
        np.testing.assert_allclose(run(converted, **feeds)[0], run(model, **feeds)[0])


def test_sizes_and_indices_stay_exact() -> None:
    """floor(7 * (1 / 7)) is 1 in float64, and 0 where a factor was rounded down."""
    text = """g (float[n] x, int64 i) => (float[n] y, int64 k) {
        d = Cast <to = 11> (i) q = Mul (d, factor) f = Floor (q) k = Cast <to = 7> (f) y = Exp (x) }"""
    model = in_float64(text, factor=1 / 3 + 1e-12)
    converted, report = halve(model)
    feeds = {"x": np.ones(2, np.float32), "i": np.array(3 * 2**30)}
    assert run(converted, **feeds)[1] == run(model, **feeds)[1] == 2**30
    assert (report.repairs, report.fp16_nodes) == ((), 1)


def test_what_takes_float64_alone_stays_with_casts_and_is_told() -> None:
    text = """<ir_version: 9, opset_import: ["": 20, "com.example": 1]>
        g (double[2] x) => (double[2] y) { a = Exp (x) b = com.example.Odd (a) y = Neg (b) }"""
    model = onnx.parser.parse_model(text)
    model.graph.value_info.append(onnx.helper.make_tensor_value_info("b", TensorProto.DOUBLE, [2]))
    converted, report = halve(model)
    assert ops(converted) == ["Cast", "Exp", "Cast", "Odd", "Cast", "Neg", "Cast"]
    assert "stays in float64: the types that com.example:Odd takes are unknown" in [repair.text for repair in report.repairs]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "g (double[2] x) => (int64[2] y) { y = BitCast <to = 7> (x) }",
            "'y' stays in float64: BitCast reads or makes the bits",
        ),
        (
            "g (seq(double[2]) s) => (double[n] y) { y = ConcatFromSequence <axis = 0> (s) }",
            "'y' .* 's' keeps its type, and no",
        ),
    ],
)
def test_a_model_of_which_nothing_can_be_float16_is_refused(text: str, message: str, tmp_path: Path) -> None:
    model = parse(text, opset=26 if "BitCast" in text else 20, ir=13 if "BitCast" in text else 9)
    source, target = in_one_file(model, tmp_path / "in.onnx"), tmp_path / "out.onnx"
    with pytest.raises(ExportError, match=f"nothing in the model can become float16: {message}"):
        convert_file(source, target)
    assert not target.exists()


@pytest.mark.parametrize("files", [0, 2])
def test_weights_in_files_are_read_one_by_one(files: int, tmp_path: Path) -> None:
    model = sums(2, 1 << 16, dtype=np.float64)
    source = with_data_files(model, tmp_path / "in.onnx", files=files) if files else in_one_file(model, tmp_path / "in.onnx")
    convert_file(source, tmp_path / "out.onnx")
    opened = open_model(tmp_path / "out.onnx")
    assert opened.size_bytes < 0.27 * open_model(source).size_bytes
    assert {tensor.data_type for tensor in opened.outline.graph.initializer} == {TensorProto.FLOAT16}
    x = np.ones(1 << 16)
    np.testing.assert_allclose(run(opened.proto, x=x)[0], run(model, x=x)[0], rtol=2e-3, atol=2e-3)


def test_a_node_that_the_user_blocks_becomes_float32() -> None:
    done = convert(onnx_ir.from_proto(in_float64(WHOLE, w=[1.0] * 4)), ConversionSettings(keep_fp32_nodes=["e"]))
    assert [(node.name, node.reason) for node in done.report.kept] == [("e", "in keep_fp32_nodes")]
    (node,) = [node for node in done.model.graph if node.name == "e"]
    assert node.outputs[0].name == "e"
    assert all(value is not None and value.dtype != onnx_ir.DataType.DOUBLE for value in node.inputs)
