from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from export.onnx_fp16.repair.limit_gelu import LimitGelu
from tests.export.onnx_fp16.models import parse
from tests.export.onnx_fp16.repair.same import operators, same, untouched

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
    after = same(gelu(), LimitGelu(), {"x": x})
    assert operators(after)[:2] == ["Clip", "Pow"]


def test_no_cube_is_over_float16() -> None:
    after = same(gelu(), LimitGelu(), {"x": np.ones((1, 64), np.float32)})
    (clip,) = [node for node in after.graph.node if node.op_type == "Clip"]
    limits = [onnx.numpy_helper.to_array(t) for t in after.graph.initializer if t.name in clip.input]
    assert [abs(float(limit)) ** 3 < 65504 for limit in limits] == [True, True]


@pytest.mark.parametrize(
    "model",
    [gelu(three=2.0), gelu(small=0.5), gelu(GELU + " z = Relu (c)"), gelu(GELU.replace("Tanh", "Sigmoid"))],
    ids=["square", "another factor", "the cube is read by others", "no tanh"],
)
def test_what_is_no_gelu_stays(model: onnx.ModelProto) -> None:
    untouched(model, LimitGelu())


def test_an_old_clip_has_its_bounds_in_attributes() -> None:
    graph = f"g (float[N, 64] x) => (float[N, 64] y) {{ {GELU} }}"
    same(parse(graph, opset=10, ir=5, **NUMBERS), LimitGelu(), {"x": np.ones((1, 64), np.float32)})
