from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from halfserve.export.export_errors import ExportError
from tests.export.onnx_fp16.models import FLOAT, FLOAT16, assert_clean_both_ways, halve, judged, normal, ops, run, types
from tests.export.stored_models import parse


def cast_types(model: onnx.ModelProto) -> list[tuple[int, int]]:
    known = types(model)
    return [(known[node.input[0]], known[node.output[0]]) for node in model.graph.node if node.op_type == "Cast"]


CHAIN = "a = Relu (x) b = Exp (a) c = Neg (b) y = Abs (c)"


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("a = Relu (x) b = Neg (x) c = Abs (x) d = Add (a, b) y = Add (c, d)", {}, "Cast Relu Neg Abs Add Add Cast"),
        ("a = Cast <to = 10> (x) b = Cast <to = 10> (x) c = Add (a, b) y = Cast <to = 1> (c)", {}, "Cast Add Cast"),
        (CHAIN, {"keep_fp32_nodes": ["b"]}, "Cast Relu Cast Exp Cast Neg Abs Cast"),
        ("a = Exp (x) b = Log (a) y = Neg (b)", {"keep_fp32_ops": ["Exp", "Log"]}, "Exp Log Cast Neg Cast"),
        ("y = Cast <to = 6> (x)", {}, "Cast"),
        ("y = Transpose (x)", {}, "Cast Transpose Cast"),
    ],
    ids=[
        "readers share one cast",
        "equal casts of the model become one",
        "a float32 node has casts around it and no more",
        "neighbours in float32 pass float32",
        "a cast to integers takes what there is",
        "what only moves numbers is float16",
    ],
)
def test_casts_stand_where_types_change_and_nowhere_else(text: str, options: dict[str, Any], expected: str) -> None:
    kind = "int32" if "<to = 6>" in text else "float"
    model = parse(f"g (float[3] x) => ({kind}[3] y) {{ {text} }}")
    feeds = {"x": np.array([1.5, -3000.7, 60001], np.float32) if kind == "int32" else normal(3)}
    assert ops(judged(model, feeds, **options)) == expected.split()


def test_a_float32_island_of_a_half_model_is_converted_too() -> None:
    model = parse("g (float16[3] x) => (float16[3] y) { f = Cast <to = 1> (x) e = Exp (f) y = Cast <to = 10> (e) }")
    assert ops(judged(model, {"x": normal(3).astype(np.float16)})) == ["Exp"]
    assert halve(model)[1].casts_added == -2


@pytest.mark.parametrize("cast", ["Cast <to = 1> (i)", "CastLike (i, x)"])
def test_a_cast_to_float_becomes_one_to_float16(cast: str) -> None:
    model = parse(f"g (int64[3] i, float[3] x) => (float[3] y) {{ f = {cast} y = Mul (f, x) }}")
    converted = assert_clean_both_ways(model, {"i": np.array([1, 2, 3]), "x": normal(3)})
    assert types(converted)["f"] == FLOAT16


def test_no_cast_from_a_type_to_itself_is_left() -> None:
    model = parse(
        """g (float[3] x) => (float[3] y) {
        a = Relu (x) b = Cast <to = 10> (a) c = Cast <to = 1> (b) d = Cast <to = 1> (c) e = Neg (d) y = Cast <to = 1> (e) }"""
    )
    for keep in (True, False):
        converted = judged(model, {"x": normal(3)}, keep=keep)
        assert all(before != after for before, after in cast_types(converted))
        assert len(cast_types(converted)) == (2 if keep else 0)


def test_what_only_moves_numbers_between_float32_nodes_stays_float32() -> None:
    model = parse(
        """g (float[2, 3] x) => (float[3, 2] y) { r = Relu (x) a = Exp (r)
        t = Transpose (a) i = Identity (t) b = Log (i) y = Neg (b) }"""
    )
    converted, report = halve(model, keep_fp32_ops=["Exp", "Log"])
    assert ops(converted) == ["Cast", "Relu", "Cast", "Exp", "Transpose", "Identity", "Log", "Cast", "Neg", "Cast"]
    assert {node.name: node.reason for node in report.kept}["t"] == "moves numbers between float32 nodes"


def test_a_vocabulary_is_float16_whatever_its_reader_is() -> None:
    model = parse(
        """g (int64[2] i) => (float[2, 5] y) {
        e = Gather (w, i) r = Exp (e) t = Transpose <perm = [1, 0]> (w) y = MatMul (r, t) }""",
        w=normal(5, 3),
    )
    converted = judged(model, {"i": np.array([4, 1])}, keep_fp32_ops=["Exp"])
    assert [weight.data_type for weight in converted.graph.initializer if list(weight.dims) == [5, 3]] == [FLOAT16]


@pytest.mark.parametrize("index", [1, 2049, 70000])
def test_an_integer_given_as_a_float_output_is_exact(index: int) -> None:
    model = parse("g (int64[1] i) => (float[1] y) { y = Cast <to = 1> (i) }")
    converted = judged(model, {"i": np.array([index])})
    assert cast_types(converted) == [(onnx.TensorProto.INT64, FLOAT)]


def test_a_cast_that_both_types_want_is_made_twice_from_its_source() -> None:
    model = parse("g (int32[2] i, float[2] x) => (float[2] f, float[2] y) { f = Cast <to = 1> (i) y = Mul (f, x) }")
    converted = assert_clean_both_ways(model, {"i": np.array([3, 60000], np.int32), "x": np.array([0.5, 0.25], np.float32)})
    assert cast_types(converted).count((onnx.TensorProto.INT32, FLOAT16)) == 1


def test_casts_to_float8_that_treat_large_numbers_differently_stay_two() -> None:
    model = parse(
        """g (float[3] x) => (float[3] y, float[3] z) {
        a = Cast <to = 17, saturate = 1> (x) y = Cast <to = 1> (a)
        b = Cast <to = 17, saturate = 0> (x) z = Cast <to = 1> (b) }"""
    )
    converted, _ = halve(model, keep_io_types=False)
    y, z = run(converted, x=np.array([1000, -1000, 1], np.float16))
    assert y.tolist() == [448, -448, 1]
    assert np.isnan(z[:2]).all()


def test_where_casts_name_types_by_text_none_is_written() -> None:
    model = parse("g (float[2, 3] x) => (float[2, 3] y) { y = Neg (x) }", opset=5, ir=3)
    with pytest.raises(
        ExportError, match=r"the model has opset 5, .*; expected 6 or later: raise it with onnx.version_converter"
    ):
        halve(model)
    onnx.checker.check_model(halve(model, keep_io_types=False)[0], full_check=True)
