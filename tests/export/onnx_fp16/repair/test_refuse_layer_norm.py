from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from export.onnx_fp16.repair.refuse_layer_norm import RefuseLayerNorm
from tests.export.onnx_fp16.models import parse
from tests.export.onnx_fp16.repair.same import operators, repaired, same, untouched

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
    after = same(model, RefuseLayerNorm(), {"x": x})
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
    untouched(model, RefuseLayerNorm())


def test_before_opset_17_it_stays_in_parts_and_says_what_to_do() -> None:
    model = parse(f"g (float[N, 16] x) => (float[N, 16] y) {{ {norm(opset=16)} }}", opset=16, ir=8, **weights())
    after, (repair,) = repaired(model, RefuseLayerNorm())
    assert operators(after) == operators(model)
    assert repair.text.startswith(
        "kept in float32: part of a LayerNormalization, one operator from opset 17 on; the model has 16"
    )


def test_a_scale_of_another_size_is_left_behind_the_norm() -> None:
    changed = {**weights(), "gain": np.array([2.0])}
    model = parse(f"g (float[N, 16] x) => (float[N, 16] y) {{ {norm()} }}", opset=17, **changed)
    x = np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)
    assert operators(same(model, RefuseLayerNorm(), {"x": x})) == ["LayerNormalization", "Mul", "Add"]
