from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from halfserve.export.onnx_files.proto_graphs import bodies
from halfserve.export.onnx_fp16.planning.decisions import ISLAND_REASON
from halfserve.export.onnx_fp16.planning.long_sums import CARRIED_REASON, SCALING_REASON, SUM_REASON
from tests.export.onnx_fp16.models import FLOAT, halve, judged, normal, reasons, run
from tests.export.stored_models import parse

SHAPE, INDEX = "shape arithmetic", "index arithmetic: float16 holds whole numbers up to 2048 only"
SCALED = "scales a sum of integer products, which float16 does not hold"
POSITION = "positions need more digits for their sine or cosine"


# The graph, its weights, inputs, and what stays in float32.
PLACES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, str]]] = {
    "computed scales": (
        """g (float[1, 1, H, W] x, int64[4] target) => (float[A, B, C, D] y) {
        s = Shape (x) f = Cast <to = 1> (s) t = Cast <to = 1> (target) k = Div (t, f)
        r = Relu (x) y = Resize <mode = "nearest"> (r, , k) }""",
        {}, {"x": normal(1, 1, 30, 41), "target": np.array([1, 1, 47, 97])}, {"k": SHAPE},
    ),
    "a shape through a branch": (
        """g (float[N] x, bool c) => (float[M] y) { s = Shape (x) f = Cast <to = 1> (s)
        b = If (c) <then_branch = t () => (float[1] p) { [p] p = Mul (f, ratio) },
            else_branch = e () => (float[1] q) { q = Identity (f) }>
        i = Cast <to = 7> (b) e = Expand (half, i) y = Neg (e) }""",
        {"ratio": 0.501, "half": 0.5}, {"x": normal(4099), "c": np.array(True)}, {"p": SHAPE},
    ),
    "data that decides a size is cast late": (
        """g (float[1, 4] x) => (float[M] y) {
        m = MatMul (x, w) e = Exp (m) c = Ceil (e) t = ReduceSum <keepdims = 0> (c) i = Cast <to = 7> (t)
        o = Unsqueeze (i, axis) z = Expand (half, o) y = Neg (z) }""",
        {"w": normal(4, 3), "axis": [0], "half": 0.5}, {}, dict.fromkeys("ect", SHAPE),
    ),
    "positions compared with a length": (
        """g (int64[1] length, float[1, 4100] x) => (float[1, 4100] y) { r = Range (zero, n, one) p = Cast <to = 1> (r)
        l = Cast <to = 1> (length) b = Less (p, l) y = Where (b, x, nothing) }""",
        {"zero": np.int64(0), "n": np.int64(4100), "one": np.int64(1), "nothing": 0.0},
        {"length": np.array([4097]), "x": np.ones((1, 4100), np.float32)}, {"b": INDEX},
    ),
    "a mask of zeros and ones": (
        """g (int64[1, 4] mask, float[1, 4] x) => (float[1, 4] y) {
        f = Cast <to = 1> (mask) i = Sub (one, f) m = Mul (i, low) s = Add (x, m) y = Softmax (s) }""",
        {"one": 1.0, "low": -10000.0}, {"mask": np.array([[1, 1, 0, 1]]), "x": normal(1, 4)}, {},
    ),
    "rotary angles up to their sine": (
        """g (int64[N] ids, float[N, 8] x) => (float[N, 8] y) { p = Cast <to = 1> (ids) u = Unsqueeze (p, axis)
        a = Einsum <equation = "ij,jk->ik"> (u, inv) c = Cos (a) s = Sin (a)
        k = Mul (x, c) l = Mul (x, s) y = Add (k, l) }""",
        {"axis": [1], "inv": (10000.0 ** -(np.arange(8) / 8)).reshape(1, 8)},
        {"ids": np.array([0, 17, 2049, 6001]), "x": normal(4, 8)}, dict.fromkeys("uacs", POSITION),
    ),
    "a sine of data": (
        "g (float[2, 4] x) => (float[2, 4] y) { m = MatMul (x, w) y = Sin (m) }", {"w": normal(4, 4)}, {"x": normal(2, 4)}, {},
    ),
    "the root of a width": (
        "g (float[2, K] x) => (float[2, K] y) { s = Shape <start = 1> (x) f = Cast <to = 1> (s) r = Sqrt (f) y = Div (x, r) }",
        {}, {"x": normal(2, 64)}, {},
    ),
    "sums of quantized products until they are scaled": (
        """g (uint8[1, 512] q, float[1] scale) => (float[1, 2] y) {
        m = MatMulInteger (q, w) f = Cast <to = 1> (m) s = Mul (f, scale) y = Add (s, bias) }""",
        {"w": np.full((512, 2), 100, np.uint8), "bias": normal(2)},
        {"q": np.full((1, 512), 200, np.uint8), "scale": np.array([1e-6], np.float32)}, {"s": SCALED},
    ),
    "numbers of another type start nothing": (
        "g (bool[3] b, float[3] x) => (float[3] y) { f = Cast <to = 1> (b) c = Ceil (f) y = Mul (x, c) }",
        {}, {"b": np.array([True, False, True]), "x": normal(3)}, {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_sizes_places_and_angles_stay_exact_and_nothing_else(name: str) -> None:
    text, weights, feeds, kept = PLACES[name]
    model = parse(text, opset=13 if "Resize" in text else 20, **weights)
    if feeds:
        judged(model, feeds)
    assert reasons(halve(model)[1]) == kept


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


HEAD = "g (float[N, L, 8] x, float[N, L, 8] z) => (float[A, B, C] y)"
KEPT = {
    "s = ReduceSum (x, one)  y = Div (s, four)": {"s": SUM_REASON, "y": SCALING_REASON},
    "s = ReduceSum (x, one)  r = Relu (s)  y = MatMul (r, w)": {"s": SUM_REASON, "r": SCALING_REASON},
    "s = ReduceSum (x, one)  y = Div (x, s)": {"s": SUM_REASON, "y": SCALING_REASON},
    "s = ReduceL2 (x, one)  m = Mul (s, four)  t = Tanh (m)  y = Neg (t)": {
        "s": SUM_REASON,
        "m": SCALING_REASON,
        "t": SCALING_REASON,
    },
    "y = CumSum (x, axis)": {"y": SUM_REASON},
    "t = Transpose <perm = [0, 2, 1]> (x)  k = MatMul (t, z)  y = MatMul (x, k)": {
        "t": ISLAND_REASON,
        "k": SUM_REASON,
        "y": SCALING_REASON,
    },
    'k = Einsum <equation = "nla,nlb->nab"> (x, z)  y = Softmax (k)': {"k": SUM_REASON, "y": SCALING_REASON},
}
STAYING_HALF = [
    "y = ReduceSum (x, two)",
    "s = ReduceMean (x, one)  y = Neg (s)",
    "y = CumSum (x, last)",
    "t = Transpose <perm = [0, 2, 1]> (z)  y = MatMul (x, t)",
    "t = Transpose <perm = [0, 2, 1]> (z)  k = MatMul (x, t)  a = Softmax (k)  y = MatMul (a, z)",
    'k = Einsum <equation = "nla,nma->nlm"> (x, z)  a = Softmax (k)  y = Einsum <equation = "nlm,nma->nla"> (a, z)',
]
IN_A_BRANCH = """d = Identity (c)  k = If (c) <
    then_branch = t () => (float[3] a) { a = Add (h, x) },
    else_branch = e () => (float[3] b) { b = Identity (h) }
>"""
WEIGHTS: dict[str, Any] = {"one": [1], "two": [2], "axis": np.int64(1), "last": np.int64(2), "four": 4.0, "w": np.ones((8, 3))}


def used(text: str) -> dict[str, Any]:
    return {name: value for name, value in WEIGHTS.items() if f"{name})" in text or f"{name} " in text}


@pytest.mark.parametrize("text", KEPT)
def test_a_sum_over_an_axis_of_any_size_stays_float32_until_it_is_scaled(text: str) -> None:
    model = parse(f"{HEAD} {{ {text} }}", **used(text))
    feeds = {"x": np.abs(normal(2, 5, 8)) + 0.1, "z": normal(2, 5, 8)}
    judged(model, feeds)
    assert reasons(halve(model)[1]) == KEPT[text]


@pytest.mark.parametrize("text", STAYING_HALF)
def test_a_sum_of_a_known_count_and_an_average_become_half(text: str) -> None:
    assert halve(parse(f"{HEAD} {{ {text} }}", **used(text)))[1].kept == ()


def test_an_axis_of_unknown_size_is_a_fixed_one_where_the_batch_alone_varies() -> None:
    text = (
        "g (float[N, 4] x, int64[3] shape) => (float[A, B] y) { r = Reshape (x, shape)  y = ReduceSum <keepdims = 0> (r, one) }"
    )
    assert halve(parse(text, one=[1]))[1].kept == ()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("body", "kept"),
    [
        ("d = Identity (c)  k = Add (h, x)", True),
        ("d = Identity (c)  m = Mul (h, x)  k = Sub (m, x)", True),
        ("d = Identity (c)  e = Expand (h, sizes)  s = Add (x, e)  k = Where (c, s, h)", True),
        (IN_A_BRANCH, True),
        ("d = Identity (c)  a = Add (h, x)  k = Tanh (a)", False),
        ("d = Identity (c)  k = Mul (h, x)", False),
        ("d = Identity (c)  a = Add (x, x)  k = Max (h, a)", False),
    ],
)
def test_a_sum_that_a_loop_carries_stays_float32(body: str, kept: bool, dtype: Any) -> None:
    model = parse(
        f"""g (float[3] x) => (float[3] y) {{ go = Cast <to = 9> (turns)  z = Abs (x)
        y = Loop (turns, go, z) <body = b (int64 i, bool c, float[3] h) => (bool d, float[3] k) {{ {body} }}> }}""",
        turns=np.int64(5),
        sizes=[3],
    )
    assert (CARRIED_REASON in reasons(halve(model, dtype=dtype)[1]).values()) == kept
    if dtype == "float16":
        judged(model, {"x": normal(3)})


def test_a_running_sum_that_a_scan_lists_is_float32_in_every_result() -> None:
    model = parse(
        """g (float[L, 3] x) => (float[3] y, float[L, 3] all) { z = ReduceMax <keepdims = 0> (x, zero)
        s, seen = Scan <num_scan_inputs = 1, body = b (float[3] h, float[3] e) => (float[3] k, float[3] o)
            { t = Sigmoid (e)  k = Add (h, t)  o = Identity (k) }> (z, x)
        y = Neg (s)  all = Neg (seen) }""",
        zero=[0],
    )
    converted = judged(model, {"x": normal(6, 3)})
    assert [node.op_type for node in halve(model)[1].kept] == ["Add", "Neg", "Neg"]
    (body,) = (body for node in converted.graph.node for body in bodies(node))
    assert [value.type.tensor_type.elem_type for value in body.output] == [FLOAT, FLOAT]
