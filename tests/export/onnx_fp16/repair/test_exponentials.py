from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from halfserve.export.onnx_fp16.repair.exponentials import (
    FUSE_LOG_SOFTMAX,
    FUSE_SOFTMAX,
    FUSE_SOFTPLUS,
    LIMIT_GELU,
    SPELL_OUT_SILU,
)
from tests.export.onnx_fp16.repair.same import answers, assert_untouched, operators, repaired, same
from tests.export.stored_models import parse

X3 = np.random.default_rng(0).standard_normal((3, 4, 5)).astype(np.float32)
AXES: dict[str, Any] = {"axes": np.array([1], np.int64), "other": np.array([2], np.int64), "two": np.array([1, 2], np.int64)}


def softmax(text: str, opset: int = 18) -> onnx.ModelProto:
    return parse(f"g (float[3, 4, 5] x) => (float[3, 4, 5] y) {{ {text} }}", opset=opset, **AXES)


@pytest.mark.parametrize("before", ["e = Exp (x)", "m = ReduceMax (x, axes) s = Sub (x, m) e = Exp (s)"])
def test_both_ways_to_write_it_become_one(before: str) -> None:
    after = same(softmax(f"{before} t = ReduceSum (e, axes) y = Div (e, t)"), FUSE_SOFTMAX, {"x": X3})
    assert operators(after) == ["Softmax"]


def test_a_shift_over_another_axis_stays_in_front() -> None:
    text = "m = ReduceMax (x, other) s = Sub (x, m) e = Exp (s) t = ReduceSum (e, axes) y = Div (e, t)"
    assert operators(same(softmax(text), FUSE_SOFTMAX, {"x": X3})) == ["ReduceMax", "Sub", "Softmax"]


@pytest.mark.parametrize(("name", "left"), [("e", None), ("t", None), ("y", None), ("m", ["ReduceMax", "Sub", "Softmax"])])
def test_what_a_user_wants_in_float32_stays_as_it_is(name: str, left: list[str] | None) -> None:
    shifted = softmax("m = ReduceMax (x, axes) s = Sub (x, m) e = Exp (s) t = ReduceSum (e, axes) y = Div (e, t)")
    node = next(node for node in shifted.graph.node if node.name == name)
    node.metadata_props.add(key="halfserve.keep", value="asked for")
    if left is None:
        assert_untouched(shifted, FUSE_SOFTMAX)
    else:
        assert operators(same(shifted, FUSE_SOFTMAX, {"x": X3})) == left


@pytest.mark.parametrize(
    "text",
    [
        "e = Exp (x) t = ReduceSum (e, two) y = Div (e, t)",
        "e = Exp (x) t = ReduceSum (e, axes) y = Div (t, e)",
        "e = Exp (x) t = ReduceSum (e, axes) d = Div (e, t) y = Add (d, e)",
        "e = Exp (x) s = Relu (x) t = ReduceSum (s, axes) y = Div (e, t)",
    ],
)
def test_what_is_no_softmax_stays(text: str) -> None:
    assert_untouched(softmax(text), FUSE_SOFTMAX)


# Softplus and LogSoftmax, found in their parts.

X = {"x": (np.random.default_rng(0).standard_normal((3, 8)) * 5).astype(np.float32)}
LOG_SOFTMAX = "e = Exp (x) t = ReduceSum (e, last) l = Log (t) y = Sub (x, l)"


@pytest.mark.parametrize("addition", ["Add (e, one)", "Add (one, e)"])
def test_softplus(addition: str) -> None:
    model = parse(f"g (float[3, 8] x) => (float[3, 8] y) {{ e = Exp (x) o = {addition} y = Log (o) }}", one=np.array(1.0))
    assert operators(same(model, FUSE_SOFTPLUS, X)) == ["Softplus"]


def test_softplus_of_a_hundred_is_a_hundred() -> None:
    model = parse("g (float[3, 8] x) => (float[3, 8] y) { e = Exp (x) o = Add (e, one) y = Log (o) }", one=np.array(1.0))
    hundreds = {"x": np.full((3, 8), 100, np.float32)}
    assert np.isinf(answers(model, hundreds)[0]).all()
    assert (answers(repaired(model, FUSE_SOFTPLUS)[0], hundreds)[0] == 100).all()


@pytest.mark.parametrize(
    ("body", "outputs", "one"),
    [
        ("e = Exp (x) o = Add (e, one) y = Log (o)", "float[3, 8] y", np.array(2.0)),
        ("e = Exp (x) o = Add (e, one) y = Log (o)", "float[3, 8] y, float[3, 8] o", np.array(1.0)),
        ("e = Exp (x) o = Add (e, one) y = Log (o)", "float[3, 8] y, float[3, 8] e", np.array(1.0)),
        ("e = Exp (x) o = Add (e, one) y = Log (o)", "float[1, 3, 8] y", np.ones((1, 1, 1))),
        ("e = Exp (x) o = Sub (e, one) y = Log (o)", "float[3, 8] y", np.array(1.0)),
    ],
    ids=["another number", "the sum is read", "the exponential is read", "the rank grows", "no sum"],
)
def test_what_is_no_softplus_stays(body: str, outputs: str, one: np.ndarray) -> None:
    assert_untouched(parse(f"g (float[3, 8] x) => ({outputs}) {{ {body} }}", one=one), FUSE_SOFTPLUS)


@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_log_softmax(axis: int) -> None:
    model = parse(f"g (float[3, 8] x) => (float[3, 8] y) {{ {LOG_SOFTMAX} }}", last=np.array([axis]))
    assert operators(same(model, FUSE_LOG_SOFTMAX, X)) == ["LogSoftmax"]


@pytest.mark.parametrize(
    ("body", "outputs", "axes"),
    [
        (LOG_SOFTMAX, "float[3, 8] y", [0, 1]),
        (LOG_SOFTMAX, "float[3, 8] y, float[3, 1] l", [-1]),
        (LOG_SOFTMAX, "float[3, 8] y, float[3, 8] e", [-1]),
        (LOG_SOFTMAX.replace("Sub (x, l)", "Sub (l, x)"), "float[3, 8] y", [-1]),
        (LOG_SOFTMAX.replace("Exp (x)", "Exp (n)").replace("e =", "n = Neg (x) e ="), "float[3, 8] y", [-1]),
    ],
    ids=["two axes", "the logarithm is read", "the exponential is read", "the other way round", "of another value"],
)
def test_what_is_no_log_softmax_stays(body: str, outputs: str, axes: list[int]) -> None:
    assert_untouched(parse(f"g (float[3, 8] x) => ({outputs}) {{ {body} }}", last=np.array(axes)), FUSE_LOG_SOFTMAX)


def test_an_older_opset_means_another_log_softmax() -> None:
    body = LOG_SOFTMAX.replace("ReduceSum (e, last)", "ReduceSum <axes = [-1]> (e)")
    assert_untouched(parse(f"g (float[3, 8] x) => (float[3, 8] y) {{ {body} }}", opset=12), FUSE_LOG_SOFTMAX)


GELU = """c = Pow (x, three) s = Mul (small, c) a = Add (x, s) r = Mul (a, root) t = Tanh (r)
    o = Add (t, one) p = Mul (x, o) y = Mul (p, half)"""
NUMBERS: dict[str, Any] = {
    "three": np.array(3.0),
    "small": np.array(0.044715),
    "root": np.array(0.7978846),
    "one": np.array(1.0),
    "half": np.array(0.5),
}


def gelu(text: str = GELU, **numbers: float) -> onnx.ModelProto:
    changed = {name: np.array(number) for name, number in numbers.items()}
    return parse(f"g (float[N, 64] x) => (float[N, 64] y) {{ {text} }}", **{**NUMBERS, **changed})


def test_it_answers_the_same_from_end_to_end() -> None:
    x = np.concatenate([np.linspace(-8, 8, 64), np.linspace(-6e4, 6e4, 64)]).reshape(2, 64).astype(np.float32)
    after = same(gelu(), LIMIT_GELU, {"x": x})
    assert operators(after)[:2] == ["Clip", "Pow"]


def test_no_cube_is_over_float16() -> None:
    after = same(gelu(), LIMIT_GELU, {"x": np.ones((1, 64), np.float32)})
    (clip,) = [node for node in after.graph.node if node.op_type == "Clip"]
    limits = [onnx.numpy_helper.to_array(t) for t in after.graph.initializer if t.name in clip.input]
    assert [abs(float(limit)) ** 3 < 65504 for limit in limits] == [True, True]


@pytest.mark.parametrize(
    "model",
    [gelu(three=2.0), gelu(small=0.5), gelu(GELU + " z = Relu (c)"), gelu(GELU.replace("Tanh", "Sigmoid"))],
    ids=["square", "another factor", "the cube is read by others", "no tanh"],
)
def test_what_is_no_gelu_stays(model: onnx.ModelProto) -> None:
    assert_untouched(model, LIMIT_GELU)


def test_an_old_clip_has_its_bounds_in_attributes() -> None:
    graph = f"g (float[N, 64] x) => (float[N, 64] y) {{ {GELU} }}"
    same(parse(graph, opset=10, ir=5, **NUMBERS), LIMIT_GELU, {"x": np.ones((1, 64), np.float32)})


# SiLU, which CUDA's kernels compute less exactly than its parts.


@pytest.mark.parametrize("product", ["Mul (x, s)", "Mul (s, x)"])
def test_silu_is_spelled_out(product: str) -> None:
    model = parse(f"g (float[3, 8] x) => (float[3, 8] y) {{ s = Sigmoid (x) y = {product} }}")
    assert operators(same(model, SPELL_OUT_SILU, X)) == ["Neg", "Exp", "Add", "Div"]


@pytest.mark.parametrize(
    ("body", "outputs"),
    [
        ("s = Sigmoid (x) y = Mul (x, s)", "float[3, 8] y, float[3, 8] s"),
        ("s = Sigmoid (x) r = Relu (x) y = Mul (r, s)", "float[3, 8] y"),
        ("s = Sigmoid (x) y = Mul (s, s)", "float[3, 8] y"),
        ("s = Sigmoid (x) y = Add (x, s)", "float[3, 8] y"),
    ],
    ids=["the sigmoid is read", "a gate", "a square", "a sum"],
)
def test_what_is_no_silu_stays(body: str, outputs: str) -> None:
    assert_untouched(parse(f"g (float[3, 8] x) => ({outputs}) {{ {body} }}"), SPELL_OUT_SILU)
