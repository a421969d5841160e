from __future__ import annotations

import re
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from export.onnx_fp16.repair.refuse_moments import RefuseMoments
from tests.export.onnx_fp16.models import FLOAT16, parse
from tests.export.onnx_fp16.repair.same import answers, operators, repaired, same, untouched

BODY = """m = ReduceMean (x, last) q = Mul (x, x) s = ReduceMean (q, last) z = Mul (m, m) v = Sub (s, z) e = Add (v, eps)
r = Sqrt (e) d = Sub (x, m) y = Div (d, r)"""


def model(body: str = BODY, *, outputs: str = "float[4, 16] y", opset: int = 20, eps: float = 1e-5) -> onnx.ModelProto:
    weights = {"last": np.array([-1]), "eps": np.array(eps), "two": np.array(2.0), "first": np.array([0])}
    used: dict[str, Any] = {name: array for name, array in weights.items() if name in body}
    return parse(f"g (float[4, 16] x) => ({outputs}) {{ {body} }}", opset=opset, **used)


def numbers(seed: int = 0, scale: float = 1.0) -> dict[str, np.ndarray]:
    return {"x": (np.random.default_rng(seed).standard_normal((4, 16)) * scale).astype(np.float32)}


@settings(max_examples=20)
@given(st.integers(-3, 4), st.integers(1, 8), st.integers(0, 99))
def test_it_becomes_one_operator(exponent: int, epsilon: int, seed: int) -> None:
    after = same(model(eps=10.0**-epsilon), RefuseMoments(), numbers(seed, 10.0**exponent), 2e-5)
    assert operators(after) == ["LayerNormalization"]


def test_powers_of_two_are_squares_too() -> None:
    body = BODY.replace("Mul (x, x)", "Pow (x, two)").replace("Mul (m, m)", "Pow (m, two)")
    assert operators(same(model(body), RefuseMoments(), numbers())) == ["LayerNormalization"]


def test_the_epsilon_may_be_cast() -> None:
    body = "k = Cast <to = 1> (eps) " + BODY.replace("Add (v, eps)", "Add (v, k)")
    assert operators(same(model(body), RefuseMoments(), numbers())) == ["LayerNormalization"]


def test_the_mean_and_the_inverse_deviation_go_on_to_their_readers() -> None:
    body = f"{BODY} i = Reciprocal (r) n = Neg (m)"
    outputs = "float[4, 16] y, float[4, 1] m, float[4, 1] i, float[4, 1] n"
    after = same(model(body, outputs=outputs), RefuseMoments(), numbers())
    assert operators(after) == ["LayerNormalization", "Neg"]


@pytest.mark.parametrize("shown", ["q", "s", "z", "v", "e", "r", "d"])
def test_what_the_model_gives_out_is_not_taken_away(shown: str) -> None:
    untouched(model(outputs=f"float[4, 16] y, float[4, c] {shown}"), RefuseMoments())


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
def test_what_is_no_layer_norm_stays(old: str, new: str) -> None:
    assert old in BODY
    untouched(model(BODY.replace(old, new)), RefuseMoments())


@pytest.mark.parametrize("kind", [FLOAT16, onnx.TensorProto.BFLOAT16])
def test_what_is_not_float32_stays(kind: int) -> None:
    inside = re.sub(r"\bx\b", "w", BODY).replace("eps", "k")
    body = f"w = Cast <to = {kind}> (x) k = Cast <to = {kind}> (eps) {inside} o = Cast <to = 1> (y)"
    untouched(model(body, outputs="float[4, 16] o"), RefuseMoments())


def test_an_older_opset_has_no_such_operator() -> None:
    body = BODY.replace("ReduceMean (x, last)", "ReduceMean <axes = [-1]> (x)").replace(
        "ReduceMean (q, last)", "ReduceMean <axes = [-1]> (q)"
    )
    _, (repair,) = repaired(model(body, opset=16), RefuseMoments())
    assert repair.text.startswith(
        "kept in float32: part of a LayerNormalization, one operator from opset 17 on; the model has 16"
    )
    same(model(body, opset=17), RefuseMoments(), numbers())


def test_numbers_far_from_zero_lose_less_than_before() -> None:
    x = numbers()["x"] + np.float32(3000)
    before = model()
    after, _ = repaired(before, RefuseMoments())
    exact = x.astype(np.float64) - x.mean(-1, keepdims=True, dtype=np.float64)
    wanted = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5)
    errors = [float(np.abs(answers(one, {"x": x})[0] - wanted).max()) for one in (before, after)]
    assert errors[1] <= errors[0]
