from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from export.onnx_fp16.repair.refuse_softmax import RefuseSoftmax
from tests.export.onnx_fp16.models import parse
from tests.export.onnx_fp16.repair.same import operators, same, untouched

X = np.random.default_rng(0).standard_normal((3, 4, 5)).astype(np.float32)
AXES: dict[str, Any] = {"axes": np.array([1], np.int64), "other": np.array([2], np.int64), "two": np.array([1, 2], np.int64)}


def model(text: str, opset: int = 18) -> onnx.ModelProto:
    return parse(f"g (float[3, 4, 5] x) => (float[3, 4, 5] y) {{ {text} }}", opset=opset, **AXES)


@pytest.mark.parametrize("before", ["e = Exp (x)", "m = ReduceMax (x, axes) s = Sub (x, m) e = Exp (s)"])
def test_both_ways_to_write_it_become_one(before: str) -> None:
    after = same(model(f"{before} t = ReduceSum (e, axes) y = Div (e, t)"), RefuseSoftmax(), {"x": X})
    assert operators(after) == ["Softmax"]


def test_a_shift_over_another_axis_stays_in_front() -> None:
    text = "m = ReduceMax (x, other) s = Sub (x, m) e = Exp (s) t = ReduceSum (e, axes) y = Div (e, t)"
    assert operators(same(model(text), RefuseSoftmax(), {"x": X})) == ["ReduceMax", "Sub", "Softmax"]


@pytest.mark.parametrize(("name", "left"), [("e", None), ("t", None), ("y", None), ("m", ["ReduceMax", "Sub", "Softmax"])])
def test_what_a_user_wants_in_float32_stays_as_it_is(name: str, left: list[str] | None) -> None:
    shifted = model("m = ReduceMax (x, axes) s = Sub (x, m) e = Exp (s) t = ReduceSum (e, axes) y = Div (e, t)")
    node = next(node for node in shifted.graph.node if node.name == name)
    node.metadata_props.add(key="halfserve.keep", value="asked for")
    if left is None:
        untouched(shifted, RefuseSoftmax())
    else:
        assert operators(same(shifted, RefuseSoftmax(), {"x": X})) == left


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
    untouched(model(text), RefuseSoftmax())
