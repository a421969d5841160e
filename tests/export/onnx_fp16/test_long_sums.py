from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from halfserve.export.onnx_files.proto_graphs import bodies
from halfserve.export.onnx_fp16.planning.decisions import ISLAND_REASON
from halfserve.export.onnx_fp16.planning.long_sums import CARRIED_REASON, SCALING_REASON, SUM_REASON
from tests.export.onnx_fp16.models import FLOAT, halve, judged, normal, reasons
from tests.export.stored_models import parse

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
