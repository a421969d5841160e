from __future__ import annotations

import re
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfserve.export.onnx_fp16.repair.norms import FUSE_LAYER_NORM, FUSE_MOMENTS
from tests.export.onnx_fp16.models import FLOAT16
from tests.export.onnx_fp16.repair.same import answers, assert_untouched, operators, repaired, same
from tests.export.stored_models import parse

SQUARES = ("Pow (d, two)", "Mul (d, d)")
ENDS = ("n = Div (d, s)", "r = Reciprocal (s) n = Mul (d, r)", "r = Reciprocal (s) n = Mul (r, d)")


def norm(
    square: str = SQUARES[0],
    end: str = ENDS[0],
    tail: str = "g = Mul (n, gain) y = Add (g, shift)",
    *,
    opset: int = 17,
    **changes: str,
) -> str:
    mean = "ReduceMean <axes = [-1]> ({})" if opset < 18 else "ReduceMean ({}, axes)"
    parts = {
        "m": f"m = {mean.format('x')}", "d": "d = Sub (x, m)", "q": f"q = {square}", "v": f"v = {mean.format('q')}",
        "e": "e = Add (v, epsilon)", "s": "s = Sqrt (e)",
    }  # fmt: skip
    return f"{' '.join({**parts, **changes}.values())} {end} {tail}"


def weights(size: int = 16) -> dict[str, Any]:
    random = np.random.default_rng(0)
    return {
        "two": np.array(2.0), "epsilon": np.array(1e-5), "gain": random.standard_normal(size),
        "shift": random.standard_normal(size), "axes": np.array([-1], np.int64),
    }  # fmt: skip


@settings(max_examples=20)
@given(
    st.sampled_from(SQUARES),
    st.sampled_from(ENDS),
    st.sampled_from(["g = Mul (n, gain) y = Add (g, shift)", "g = Mul (gain, n) y = Add (shift, g)", "y = Identity (n)"]),
    st.sampled_from([17, 20]),
    st.integers(0, 99),
)
def test_all_ways_to_write_it_become_one(square: str, end: str, tail: str, opset: int, seed: int) -> None:
    model = parse(
        f"g (float[N, 3, 16] x) => (float[N, 3, 16] y) {{ {norm(square, end, tail, opset=opset)} }}", opset=opset, **weights()
    )
    x = np.random.default_rng(seed).standard_normal((4, 3, 16)).astype(np.float32) * 30
    after = same(model, FUSE_LAYER_NORM, {"x": x})
    assert operators(after) == ["LayerNormalization", *(["Identity"] if "Identity" in tail else [])]
    assert after.graph.output[0].name == "y"


@pytest.mark.parametrize(
    "text",
    [
        norm() + " z = Relu (v)",  # the variance is read by another
        norm(m="m = ReduceMean <axes = [0]> (x)") + " z = Relu (x)",  # another axis
        norm(q="q = Pow (d, three)") + " z = Relu (x)",
        norm(d="d = Sub (m, x)") + " z = Relu (x)",
        norm(m="o = Relu (x) m = ReduceMean <axes = [-1]> (o)") + " z = Relu (x)",  # the mean of something else
    ],
)
def test_what_is_no_layer_norm_stays(text: str) -> None:
    model = parse(
        f"g (float[N, 16] x) => (float[N, 16] y, float[N, c] z) {{ {text} }}", opset=17, three=np.array(3.0), **weights()
    )
    assert_untouched(model, FUSE_LAYER_NORM)


def test_before_opset_17_it_stays_in_parts_and_says_what_to_do() -> None:
    model = parse(f"g (float[N, 16] x) => (float[N, 16] y) {{ {norm(opset=16)} }}", opset=16, ir=8, **weights())
    after, (repair,) = repaired(model, FUSE_LAYER_NORM)
    assert operators(after) == operators(model)
    assert repair.text.startswith(
        "kept in float32: part of a LayerNormalization, one operator from opset 17 on; the model has 16"
    )


def test_a_scale_of_another_size_is_left_behind_the_norm() -> None:
    changed = {**weights(), "gain": np.array([2.0])}
    model = parse(f"g (float[N, 16] x) => (float[N, 16] y) {{ {norm()} }}", opset=17, **changed)
    x = np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)
    assert operators(same(model, FUSE_LAYER_NORM, {"x": x})) == ["LayerNormalization", "Mul", "Add"]


BODY = """m = ReduceMean (x, last) q = Mul (x, x) s = ReduceMean (q, last) z = Mul (m, m) v = Sub (s, z) e = Add (v, eps)
r = Sqrt (e) d = Sub (x, m) y = Div (d, r)"""


def moments(body: str = BODY, *, outputs: str = "float[4, 16] y", opset: int = 20, eps: float = 1e-5) -> onnx.ModelProto:
    weights = {"last": np.array([-1]), "eps": np.array(eps), "two": np.array(2.0), "first": np.array([0])}
    used: dict[str, Any] = {name: array for name, array in weights.items() if name in body}
    return parse(f"g (float[4, 16] x) => ({outputs}) {{ {body} }}", opset=opset, **used)


def numbers(seed: int = 0, scale: float = 1.0) -> dict[str, np.ndarray]:
    return {"x": (np.random.default_rng(seed).standard_normal((4, 16)) * scale).astype(np.float32)}


@settings(max_examples=20)
@given(st.integers(-3, 4), st.integers(1, 8), st.integers(0, 99))
def test_it_becomes_one_operator(exponent: int, epsilon: int, seed: int) -> None:
    after = same(moments(eps=10.0**-epsilon), FUSE_MOMENTS, numbers(seed, 10.0**exponent), 2e-5)
    assert operators(after) == ["LayerNormalization"]


def test_powers_of_two_are_squares_too() -> None:
    body = BODY.replace("Mul (x, x)", "Pow (x, two)").replace("Mul (m, m)", "Pow (m, two)")
    assert operators(same(moments(body), FUSE_MOMENTS, numbers())) == ["LayerNormalization"]


def test_the_epsilon_may_be_cast() -> None:
    body = "k = Cast <to = 1> (eps) " + BODY.replace("Add (v, eps)", "Add (v, k)")
    assert operators(same(moments(body), FUSE_MOMENTS, numbers())) == ["LayerNormalization"]


def test_the_mean_and_the_inverse_deviation_go_on_to_their_readers() -> None:
    body = f"{BODY} i = Reciprocal (r) n = Neg (m)"
    outputs = "float[4, 16] y, float[4, 1] m, float[4, 1] i, float[4, 1] n"
    after = same(moments(body, outputs=outputs), FUSE_MOMENTS, numbers())
    assert operators(after) == ["LayerNormalization", "Neg"]


@pytest.mark.parametrize("shown", ["q", "s", "z", "v", "e", "r", "d"])
def test_what_the_model_gives_out_is_not_taken_away(shown: str) -> None:
    assert_untouched(moments(outputs=f"float[4, 16] y, float[4, c] {shown}"), FUSE_MOMENTS)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("q = Mul (x, x)", "q = Abs (x)"),
        ("z = Mul (m, m)", "z = Mul (m, eps)"),
        ("v = Sub (s, z)", "v = Sub (z, s)"),
        ("d = Sub (x, m)", "d = Sub (m, x)"),
        ("d = Sub (x, m)", "o = ReduceMax (x, last) d = Sub (x, o)"),
        ("y = Div (d, r)", "y = Div (r, d)"),
        ("s = ReduceMean (q, last)", "s = ReduceMean (q, first)"),
        ("m = ReduceMean (x, last)", "m = ReduceMean (x, first)"),
    ],
)
def test_other_moments_stay(old: str, new: str) -> None:
    assert old in BODY
    assert_untouched(moments(BODY.replace(old, new)), FUSE_MOMENTS)


@pytest.mark.parametrize("kind", [FLOAT16, onnx.TensorProto.BFLOAT16])
def test_what_is_not_float32_stays(kind: int) -> None:
    inside = re.sub(r"\bx\b", "w", BODY).replace("eps", "k")
    body = f"w = Cast <to = {kind}> (x) k = Cast <to = {kind}> (eps) {inside} o = Cast <to = 1> (y)"
    assert_untouched(moments(body, outputs="float[4, 16] o"), FUSE_MOMENTS)


def test_an_older_opset_has_no_such_operator() -> None:
    body = BODY.replace("ReduceMean (x, last)", "ReduceMean <axes = [-1]> (x)").replace(
        "ReduceMean (q, last)", "ReduceMean <axes = [-1]> (q)"
    )
    _, (repair,) = repaired(moments(body, opset=16), FUSE_MOMENTS)
    assert repair.text.startswith(
        "kept in float32: part of a LayerNormalization, one operator from opset 17 on; the model has 16"
    )
    same(moments(body, opset=17), FUSE_MOMENTS, numbers())


def test_numbers_far_from_zero_lose_less_than_before() -> None:
    x = numbers()["x"] + np.float32(3000)
    before = moments()
    after, _ = repaired(before, FUSE_MOMENTS)
    exact = x.astype(np.float64) - x.mean(-1, keepdims=True, dtype=np.float64)
    wanted = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5)
    errors = [float(np.abs(answers(one, {"x": x})[0] - wanted).max()) for one in (before, after)]
    assert errors[1] <= errors[0]
