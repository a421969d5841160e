from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir
import pytest

from halfserve.export.conversion_settings import ConversionSettings
from halfserve.export.onnx_fp16.convert import convert
from halfserve.export.onnx_fp16.planning.plan import KEEP
from halfserve.export.onnx_fp16.prepare import prepare
from halfserve.export.onnx_fp16.repair import run_passes
from halfserve.export.onnx_fp16.repair.fragile_chains import KEEP_FRAGILE
from tests.export.stored_models import parse

AXES = np.array([-1], np.int64)


def kept(text: str, opset: int = 20, **numbers: Any) -> dict[str, str]:
    """The marked nodes of y = f(x), by name (each is named after its output), with the reasons."""
    weights = {"axes": AXES, "two": np.array(2.0), "gain": np.ones(16), **{k: np.array(v) for k, v in numbers.items()}}
    used: dict[str, Any] = {name: array for name, array in weights.items() if name in text}
    model = onnx_ir.from_proto(parse(f"g (float[N, 16] x) => (float[N, c] y) {{ {text} }}", opset=opset, **used))
    before = onnx_ir.to_proto(model)
    prepare(model, ConversionSettings())
    run_passes(model, [KEEP_FRAGILE])
    assert run_passes(model, [KEEP_FRAGILE]) == ()
    assert [n.op_type for n in model.graph] == [n.op_type for n in before.graph.node], "nothing but marks"
    return {node.name or "": node.metadata_props[KEEP] for node in model.graph if KEEP in node.metadata_props}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("q = Pow (x, two) v = ReduceMean (q, axes) e = Add (v, eps) s = Sqrt (e) n = Div (x, s) y = Mul (n, gain)", "qvesny"),
        ("q = Mul (x, x) t = ReduceSum (q, axes) r = Sqrt (t) n = Div (x, r) o = Relu (n) y = Relu (o)", "qtrn"),
        ("t = ReduceL2 (x, axes) c = Clip (t, eps) y = Div (x, c)", "tcy"),
        ("t = ReduceSumSquare (x, axes) r = Sqrt (t) i = Reciprocal (r) n = Mul (x, i) y = Relu (n)", "trin"),
    ],
)
def test_norms_in_parts_are_kept_whole(text: str, names: str) -> None:
    found = kept(text, eps=1e-5)
    assert sorted(found) == sorted(names)
    assert set(found.values()) <= {
        "a sum of squares can outgrow float16 before its root is taken",
        "float16 loses the epsilon 1e-05",
    }


def test_a_sum_of_squares_without_a_root_is_not_said_to_have_one() -> None:
    """A factorization machine: half of (the square of the sum - the sum of the squares), and its sigmoid."""
    found = kept("q = Mul (x, x) t = ReduceSum (q, axes) h = Mul (t, half) y = Sigmoid (h)", half=0.5)
    assert set(found) == set("qthy")
    assert set(found.values()) == {"a sum of squares that only what follows brings back into float16's range"}


def test_both_sides_of_a_difference_of_means_are_kept() -> None:
    text = "q = Mul (x, x) a = ReduceMean (q, axes) m = ReduceMean (x, axes) b = Mul (m, m) v = Sub (a, b) y = Sqrt (v)"
    assert sorted(kept(text)) == sorted("qambvy")


@pytest.mark.parametrize("epsilon", [1e-5, 1e-8, 1e-20])
@pytest.mark.parametrize("guard", ["e = Add (x, eps)", "e = Max (x, eps)", "e = Clip (x, eps)"])
def test_epsilons_are_kept_up_to_what_they_guard(epsilon: float, guard: str) -> None:
    found = kept(f"{guard} l = Log (e) y = Relu (l)", eps=epsilon)
    assert found == dict.fromkeys("el", f"float16 loses the epsilon {epsilon:.3g}")


def test_what_a_small_difference_is_made_of_is_kept_too() -> None:
    text = "a = ReduceMax (x, axes) b = ReduceMin (x, axes) d = Sub (a, b) e = Add (d, eps) y = Div (x, e)"
    assert sorted(kept(text, eps=1e-8)) == sorted("abdey")


def test_a_scale_and_its_inverse_are_kept_with_what_is_between() -> None:
    found = kept("a = Mul (x, up) b = Relu (a) c = Div (b, up) y = Relu (c)", up=3e5)
    assert found == dict.fromkeys("abc", "scaled by 3e+05 and back")


def test_a_sum_of_exponentials_is_kept_up_to_its_logarithm() -> None:
    assert sorted(kept("e = Exp (x) t = ReduceSum (e, axes) l = Log (t) y = Relu (l)")) == sorted("etl")


@pytest.mark.parametrize(
    "text",
    [
        "q = Mul (x, x) y = Relu (q)",  # nothing brings it back: its user wants it so
        "e = Add (x, half) y = Log (e)",
        "a = Mul (x, half) y = Relu (a)",
        "a = Mul (x, up) y = Relu (a)",
        "e = Add (x, eps) y = Relu (e)",  # an epsilon that guards nothing
        "m = ReduceMean (x, axes) y = Sub (x, m)",
        "e = Exp (x) y = Relu (e)",
    ],
)
def test_what_float16_bears_is_left_alone(text: str) -> None:
    assert kept(text, half=0.5, up=3e5, eps=1e-8) == {}


def test_a_chain_without_end_is_left_to_verification() -> None:
    steps = " ".join(f"a{i + 1} = Add (a{i}, two)" for i in range(60))
    assert kept(f"a0 = Mul (x, x) {steps} y = Div (x, a60)") == {}


def test_marks_of_the_user_stay_as_they_are() -> None:
    model = onnx_ir.from_proto(
        parse("g (float[N, 16] x) => (float[N, 16] y) { e = Add (x, eps) y = Log (e) }", eps=np.array(1e-12))
    )
    prepare(model, ConversionSettings())
    node = next(iter(model.graph))
    node.metadata_props[KEEP] = "asked for"
    run_passes(model, [KEEP_FRAGILE])
    assert node.metadata_props[KEEP] == "asked for"
    assert isinstance(onnx_ir.to_proto(model), onnx.ModelProto)


# Chains of thousands of nodes: no repair walks them by recursion, or from every node to the end.

LENGTH = 1500


@pytest.mark.long
@pytest.mark.parametrize("op", ["Mul", "Add", "Identity", "Exp", "Sqrt"])
def test_a_long_chain_is_converted(op: str) -> None:
    second = ", c" if op in ("Mul", "Add") else ""
    steps = " ".join(f"a{i + 1} = {op} (a{i}{second})" for i in range(LENGTH))
    text = f"g (float[N, 8] x) => (float[N, 8] y) {{ a0 = Relu (x) {steps} y = Softmax (a{LENGTH}) }}"
    done = convert(onnx_ir.from_proto(parse(text, c=np.array(0.5))), ConversionSettings())
    assert done.report.fp16_nodes == done.report.float_nodes


def test_a_long_chain_behind_a_mask_is_converted() -> None:
    steps = " ".join(f"a{i + 1} = Add (a{i}, c)" for i in range(LENGTH))
    text = f"g (float[N, 8] x) => (float[N, 8] y) {{ a0 = Add (x, lowest) {steps} y = Softmax (a{LENGTH}) }}"
    masked = onnx_ir.from_proto(parse(text, c=np.array(0.5), lowest=np.array(-1e9)))
    assert convert(masked, ConversionSettings()).report.float_nodes > LENGTH
