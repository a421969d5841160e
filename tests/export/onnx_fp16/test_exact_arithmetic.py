from __future__ import annotations

import numpy as np
import onnx
import pytest

from tests.export.onnx_fp16.models import halve, judged, normal, reasons, run
from tests.export.stored_models import parse

SHAPE, INDEX = "shape arithmetic", "index arithmetic: float16 holds whole numbers up to 2048 only"
POSITION = "positions up to their sine or cosine"


def test_scales_that_are_computed_are_exact() -> None:
    model = parse(
        """g (float[1, 1, H, W] x, int64[4] target) => (float[A, B, C, D] y) {
        s = Shape (x) f = Cast <to = 1> (s) t = Cast <to = 1> (target) k = Div (t, f)
        r = Relu (x) y = Resize <mode = "nearest"> (r, , k) }""",
        opset=13,
    )
    judged(model, {"x": normal(1, 1, 30, 41), "target": np.array([1, 1, 47, 97])})
    assert reasons(halve(model)[1]) == {"k": SHAPE}


def test_a_shape_through_a_branch_is_exact() -> None:
    model = parse(
        """g (float[N] x, bool c) => (float[M] y) {
        s = Shape (x) f = Cast <to = 1> (s)
        b = If (c) <then_branch = t () => (float[1] p) { p = Mul (f, ratio) },
            else_branch = e () => (float[1] q) { q = Identity (f) }>
        i = Cast <to = 7> (b) e = Expand (half, i) y = Neg (e) }""",
        ratio=0.501,
        half=0.5,
    )
    judged(model, {"x": normal(4099), "c": np.array(True)})


def test_data_that_decides_a_size_is_cast_late() -> None:
    model = parse(
        """g (float[1, 4] x) => (float[M] y) {
        m = MatMul (x, w) e = Exp (m) c = Ceil (e) t = ReduceSum <keepdims = 0> (c) i = Cast <to = 7> (t)
        o = Unsqueeze (i, axis) z = Expand (half, o) y = Neg (z) }""",
        w=normal(4, 3),
        axis=np.array([0]),
        half=0.5,
    )
    kept = reasons(halve(model)[1])
    assert {"e", "c", "t"} <= set(kept)
    assert "m" not in kept


@pytest.mark.parametrize("place", [2049, 5001, 60001])
def test_an_index_that_is_taken_apart_in_floats_is_exact(place: int) -> None:
    model = parse(
        """g (float[1, 65000] x) => (float[1, 1] column, float[1, 1] row) {
        a = ArgMax <axis = 1> (x) f = Cast <to = 1> (a) d = Div (f, width) row = Floor (d)
        m = Mul (row, width) column = Sub (f, m) }""",
        width=np.float32(97),
    )
    data = np.zeros((1, 65000), np.float32)
    data[0, place] = 1
    converted = judged(model, {"x": data})
    column, row = run(converted, x=data)
    assert (float(row[0, 0]), float(column[0, 0])) == (place // 97, place % 97)


def test_positions_compared_with_a_length_are_exact() -> None:
    model = parse(
        """g (int64[1] length, float[1, 4100] x) => (float[1, 4100] y) {
        r = Range (zero, n, one) p = Cast <to = 1> (r) l = Cast <to = 1> (length) b = Less (p, l)
        y = Where (b, x, nothing) }""",
        zero=np.int64(0),
        n=np.int64(4100),
        one=np.int64(1),
        nothing=0.0,
    )
    judged(model, {"length": np.array([4097]), "x": np.ones((1, 4100), np.float32)})
    assert reasons(halve(model)[1]) == {"b": INDEX}


@pytest.mark.parametrize(
    ("text", "exact"),
    [
        ("l = Less (f, limit)", "l"),
        ("q = Div (f, four) w = Floor (q) l = Equal (w, quarter)", "qwl"),
        ("r = Mul (f, four) l = Greater (r, limit)", "rl"),
    ],
)
def test_whole_numbers_that_come_in_are_compared_and_rounded_exactly(text: str, exact: str) -> None:
    # The caller gives them, so that nothing in the graph says they are places; what becomes of them does.
    model = parse(
        f"g (float[4] x, int64[4] places) => (float[4] y) {{ f = Cast <to = 1> (places) {text} y = Where (l, x, zero) }}",
        limit=np.array(2050.5), four=np.array(4.0), quarter=np.array(1024.0), zero=np.array(0.0),
    )  # fmt: skip
    feeds = {"x": np.arange(1, 5, dtype=np.float32), "places": np.array([512, 513, 2050, 4099])}
    converted, report = halve(model)
    np.testing.assert_array_equal(run(converted, **feeds)[0], run(model, **feeds)[0])
    assert reasons(report) == dict.fromkeys(exact, INDEX)


def test_a_mask_of_zeros_and_ones_is_float16() -> None:
    model = parse(
        """g (int64[1, 4] mask, float[1, 4] x) => (float[1, 4] y) {
        f = Cast <to = 1> (mask) i = Sub (one, f) m = Mul (i, low) s = Add (x, m) y = Softmax (s) }""",
        one=1.0,
        low=-10000.0,
    )
    judged(model, {"mask": np.array([[1, 1, 0, 1]]), "x": normal(1, 4)})
    assert halve(model)[1].kept == ()


@pytest.mark.parametrize("product", ["Mul", "MatMul", "Einsum"])
def test_rotary_angles_are_float32_up_to_their_sine(product: str) -> None:
    calls = {"Mul": "Mul (u, inv)", "MatMul": "MatMul (u, inv)", "Einsum": 'Einsum <equation = "ij,jk->ik"> (u, inv)'}
    model = parse(
        f"""g (int64[N] ids, float[N, 8] x) => (float[N, 8] y) {{
        p = Cast <to = 1> (ids) u = Unsqueeze (p, axis) a = {calls[product]} c = Cos (a) s = Sin (a)
        k = Mul (x, c) l = Mul (x, s) y = Add (k, l) }}""",
        axis=np.array([1]),
        inv=(10000.0 ** -(np.arange(8, dtype=np.float32) / 8)).reshape(1, 8),
    )
    judged(model, {"ids": np.array([0, 17, 2049, 6001]), "x": normal(4, 8)})
    kept = reasons(halve(model)[1])
    assert {kept["a"], kept["c"], kept["s"]} == {POSITION}
    assert not {"k", "l", "y"} & set(kept)


def test_a_sine_of_data_is_float16() -> None:
    model = parse("g (float[2, 4] x) => (float[2, 4] y) { m = MatMul (x, w) y = Sin (m) }", w=normal(4, 4))
    assert halve(model)[1].kept == ()


def test_a_count_that_divides_may_be_large() -> None:
    model = parse(
        """g (float[N, 400] x) => (float[1] y) {
        r = Relu (x) t = ReduceSum <keepdims = 0> (r) n = Size (x) f = Cast <to = 1> (n) m = Div (t, f)
        y = Unsqueeze (m, axis) }""",
        axis=np.array([0]),
    )
    converted, report = halve(model)
    assert "over 65504" in reasons(report)["m"]
    feeds = {"x": np.full((300, 400), 0.25, np.float32)}
    np.testing.assert_allclose(run(converted, **feeds)[0], run(model, **feeds)[0], rtol=1e-2)


def test_the_root_of_a_width_is_float16() -> None:
    model = parse(
        """g (float[2, K] x) => (float[2, K] y) {
        s = Shape <start = 1> (x) f = Cast <to = 1> (s) r = Sqrt (f) y = Div (x, r) }"""
    )
    judged(model, {"x": normal(2, 64)})
    assert halve(model)[1].kept == ()


def test_sums_of_quantized_products_are_scaled_in_float32() -> None:
    model = parse(
        """g (uint8[1, 512] q, float[1] scale) => (float[1, 2] y) {
        m = MatMulInteger (q, w) f = Cast <to = 1> (m) s = Mul (f, scale) y = Add (s, bias) }""",
        w=np.full((512, 2), 100, np.uint8),
        bias=normal(2),
    )
    judged(model, {"q": np.full((1, 512), 200, np.uint8), "scale": np.array([1e-6], np.float32)})
    assert list(reasons(halve(model)[1])) == ["s"]


def test_numbers_of_another_type_start_nothing() -> None:
    model = parse("g (bool[3] b, float[3] x) => (float[3] y) { f = Cast <to = 1> (b) c = Ceil (f) y = Mul (x, c) }")
    assert isinstance(model, onnx.ModelProto)
    assert halve(model)[1].kept == ()
