from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import onnx
import pytest

from halfserve.export.onnx_fp16.repair.edits import RepairPass
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


@pytest.mark.parametrize(("name", "left"), [("e", None), ("t", None), ("y", None), ("m", ["ReduceMax", "Sub", "Softmax"])])
def test_what_a_user_wants_in_float32_stays_as_it_is(name: str, left: list[str] | None) -> None:
    shifted = softmax("m = ReduceMax (x, axes) s = Sub (x, m) e = Exp (s) t = ReduceSum (e, axes) y = Div (e, t)")
    node = next(node for node in shifted.graph.node if node.name == name)
    node.metadata_props.add(key="halfserve.keep", value="asked for")
    if left is None:
        assert_untouched(shifted, FUSE_SOFTMAX)
    else:
        assert operators(same(shifted, FUSE_SOFTMAX, {"x": X3})) == left


# Softplus and LogSoftmax, found in their parts.

X = {"x": (np.random.default_rng(0).standard_normal((3, 8)) * 5).astype(np.float32)}
Feeds: TypeAlias = dict[str, np.ndarray[Any, Any]]


def rows(text: str, outputs: str = "float[3, 8] y", opset: int = 20, **weights: Any) -> onnx.ModelProto:
    return parse(f"g (float[3, 8] x) => ({outputs}) {{ {text} }}", opset=opset, **weights)


LOG_SOFTMAX = "e = Exp (x) t = ReduceSum (e, last) l = Log (t) y = Sub (x, l)"


def test_softplus_of_a_hundred_is_a_hundred() -> None:
    model = rows("e = Exp (x) o = Add (e, one) y = Log (o)", one=1.0)
    hundreds = {"x": np.full((3, 8), 100, np.float32)}
    assert np.isinf(answers(model, hundreds)[0]).all()
    assert (answers(repaired(model, FUSE_SOFTPLUS)[0], hundreds)[0] == 100).all()


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


def test_an_old_clip_has_its_bounds_in_attributes() -> None:
    graph = f"g (float[N, 64] x) => (float[N, 64] y) {{ {GELU} }}"
    same(parse(graph, opset=10, ir=5, **NUMBERS), LIMIT_GELU, {"x": np.ones((1, 64), np.float32)})


SHIFTED = "m = ReduceMax (x, {}) s = Sub (x, m) e = Exp (s) t = ReduceSum (e, axes) y = Div (e, t)"
SOFTPLUS = "e = Exp (x) o = Add (e, one) y = Log (o)"
FOUND: list[tuple[RepairPass, onnx.ModelProto, Feeds, list[str]]] = [
    (FUSE_SOFTMAX, softmax("e = Exp (x) t = ReduceSum (e, axes) y = Div (e, t)"), {"x": X3}, ["Softmax"]),
    (FUSE_SOFTMAX, softmax(SHIFTED.format("axes")), {"x": X3}, ["Softmax"]),
    (FUSE_SOFTMAX, softmax(SHIFTED.format("other")), {"x": X3}, ["ReduceMax", "Sub", "Softmax"]),
    (FUSE_SOFTPLUS, rows(SOFTPLUS, one=1.0), X, ["Softplus"]),
    (FUSE_SOFTPLUS, rows(SOFTPLUS.replace("e, one", "one, e"), one=1.0), X, ["Softplus"]),
    *[(FUSE_LOG_SOFTMAX, rows(LOG_SOFTMAX, last=[axis]), X, ["LogSoftmax"]) for axis in (-1, 0, 1)],
    # CUDA's kernels compute SiLU less exactly than its parts.
    (SPELL_OUT_SILU, rows("s = Sigmoid (x) y = Mul (x, s)"), X, ["Neg", "Exp", "Add", "Div"]),
    (SPELL_OUT_SILU, rows("s = Sigmoid (x) y = Mul (s, x)"), X, ["Neg", "Exp", "Add", "Div"]),
]


@pytest.mark.parametrize(("repair", "model", "feeds", "expected"), FOUND)
def test_all_ways_to_write_it_are_found(repair: RepairPass, model: onnx.ModelProto, feeds: Feeds, expected: list[str]) -> None:
    assert operators(same(model, repair, feeds)) == expected


NOT_FOUND: dict[str, tuple[RepairPass, onnx.ModelProto]] = {
    "softmax over two axes": (FUSE_SOFTMAX, softmax("e = Exp (x) t = ReduceSum (e, two) y = Div (e, t)")),
    "softmax upside down": (FUSE_SOFTMAX, softmax("e = Exp (x) t = ReduceSum (e, axes) y = Div (t, e)")),
    "softmax whose exponential is read": (
        FUSE_SOFTMAX, softmax("e = Exp (x) t = ReduceSum (e, axes) d = Div (e, t) y = Add (d, e)"),
    ),
    "softmax over the sum of others": (
        FUSE_SOFTMAX, softmax("e = Exp (x) s = Relu (x) t = ReduceSum (s, axes) y = Div (e, t)"),
    ),
    "softplus of another number": (FUSE_SOFTPLUS, rows(SOFTPLUS, one=2.0)),
    "softplus whose sum is read": (FUSE_SOFTPLUS, rows(SOFTPLUS, "float[3, 8] y, float[3, 8] o", one=1.0)),
    "softplus whose exponential is read": (FUSE_SOFTPLUS, rows(SOFTPLUS, "float[3, 8] y, float[3, 8] e", one=1.0)),
    "softplus whose rank grows": (FUSE_SOFTPLUS, rows(SOFTPLUS, "float[1, 3, 8] y", one=np.ones((1, 1, 1)))),
    "softplus by a difference": (FUSE_SOFTPLUS, rows(SOFTPLUS.replace("Add", "Sub"), one=1.0)),
    "log softmax over two axes": (FUSE_LOG_SOFTMAX, rows(LOG_SOFTMAX, last=[0, 1])),
    "log softmax whose logarithm is read": (FUSE_LOG_SOFTMAX, rows(LOG_SOFTMAX, "float[3, 8] y, float[3, 1] l", last=[-1])),
    "log softmax whose exponential is read": (FUSE_LOG_SOFTMAX, rows(LOG_SOFTMAX, "float[3, 8] y, float[3, 8] e", last=[-1])),
    "log softmax the other way round": (FUSE_LOG_SOFTMAX, rows(LOG_SOFTMAX.replace("Sub (x, l)", "Sub (l, x)"), last=[-1])),
    "log softmax of another value": (
        FUSE_LOG_SOFTMAX, rows("n = Neg (x) " + LOG_SOFTMAX.replace("Exp (x)", "Exp (n)"), last=[-1]),
    ),
    "log softmax of an older opset": (
        FUSE_LOG_SOFTMAX, rows(LOG_SOFTMAX.replace("ReduceSum (e, last)", "ReduceSum <axes = [-1]> (e)"), opset=12),
    ),
    "gelu of a square": (LIMIT_GELU, gelu(three=2.0)),
    "gelu of another factor": (LIMIT_GELU, gelu(small=0.5)),
    "gelu whose cube is read by others": (LIMIT_GELU, gelu(GELU + " z = Relu (c)")),
    "gelu without tanh": (LIMIT_GELU, gelu(GELU.replace("Tanh", "Sigmoid"))),
    "silu whose sigmoid is read": (SPELL_OUT_SILU, rows("s = Sigmoid (x) y = Mul (x, s)", "float[3, 8] y, float[3, 8] s")),
    "a gate": (SPELL_OUT_SILU, rows("s = Sigmoid (x) r = Relu (x) y = Mul (r, s)")),
    "a square": (SPELL_OUT_SILU, rows("s = Sigmoid (x) y = Mul (s, s)")),
    "a sum": (SPELL_OUT_SILU, rows("s = Sigmoid (x) y = Add (x, s)")),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_FOUND)
def test_what_is_something_else_stays(name: str) -> None:
    repair, model = NOT_FOUND[name]
    assert_untouched(model, repair)
