from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from benchmarks.converters.runtime import Session
from export.onnx_fp16.convert_float_to_float16 import convert_float_to_float16
from export.onnx_fp16.repair.keep_masks import REASON, KeepMasks
from export.verification.simulation import round_every_node
from tests.export.onnx_fp16.models import halve, normal, parse, reasons
from tests.export.onnx_fp16.repair.same import repaired, untouched

HIDDEN = "h = Cast <to = 1> (m) i = Sub (one, h) "


def masked(text: str, **numbers: Any) -> onnx.ModelProto:
    weights = {"one": np.array(1.0), "c": np.array(-30000.0), "f": np.array(8.0), "none": np.array(0.0), **numbers}
    used = {name: number for name, number in weights.items() if f"{name}" in text or name == "one"}
    return parse(f"g (float[3, 8] x, int64[3, 8] m) => (float[3, 8] y) {{ {HIDDEN} {text} y = Softmax (s) }}", opset=17, **used)


OUTGROWN = [
    ("p = Mul (i, c) a = Add (x, p) s = Mul (a, f)", "sy", {}),
    ("p = Mul (i, c) q = Mul (p, f) s = Add (x, q)", "qsy", {}),
    ("p = Mul (i, c) a = Add (x, p) s = Div (a, f)", "sy", {"f": np.array(0.125)}),
    ("p = Mul (i, c) a = Add (x, p) b = Mul (a, f) s = Div (b, f)", "bs", {}),
    ("p = Mul (i, c) a = Add (x, p) s = Add (a, p)", "sy", {"c": np.array(-65504.0)}),
    ("p = Mul (i, c) q = Neg (p) a = Add (x, p) s = Sub (a, q)", "sy", {"c": np.array(-40000.0)}),
    ("b = Cast <to = 9> (m) w = Where (b, none, c) d = Add (w, w) s = Add (x, d)", "dsy", {"c": np.array(-40000.0)}),
]


@pytest.mark.parametrize(("text", "names", "numbers"), OUTGROWN)
def test_masks_that_outgrow_float16_together_are_kept(text: str, names: str, numbers: dict[str, Any]) -> None:
    model = masked(text, **numbers)
    after, repairs = repaired(model, KeepMasks())
    assert [node.op_type for node in after.graph.node] == [node.op_type for node in model.graph.node], "nothing but marks"
    assert sorted(name for repair in repairs for name in repair.nodes) == sorted(names)
    report = halve(model, repair=True)[1]
    assert {name for name, reason in reasons(report).items() if reason == REASON} == set(names)


@pytest.mark.parametrize(("text", "names", "numbers"), [*OUTGROWN, (OUTGROWN[4][0], "", {"c": np.array(-1e9)})])
def test_a_row_that_is_hidden_whole_stays_finite(text: str, names: str, numbers: dict[str, Any]) -> None:
    mask = np.array([[1] * 8, [1, 0] * 4, [0] * 8], np.int64)
    model, feeds = masked(text, **numbers), {"x": normal(3, 8), "m": mask}
    half = round_every_node(convert_float_to_float16(model))
    wanted, reached = (Session(one.SerializeToString(), "ORT_DISABLE_ALL").run(dict(feeds))[0] for one in (model, half))
    assert np.isfinite(reached).all()
    np.testing.assert_allclose(reached[:2], wanted[:2], atol=2e-3)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("p = Mul (i, c) s = Add (x, p)", {}),
        ("p = Mul (i, c) s = Add (x, p)", {"c": np.array(-65504.0)}),
        ("p = Mul (i, c) s = Add (x, p)", {"c": np.array(-1e9)}),
        ("p = Mul (i, c) a = Add (x, bias) s = Add (a, p)", {"c": np.array(-65504.0), "bias": np.full(8, 20.0)}),
        ("p = Mul (i, c) a = Add (x, p) s = Div (a, f)", {}),
        ("p = Mul (i, c) a = Add (x, p) s = Add (a, p)", {"c": np.array(-10000.0)}),
        ("a = Mul (x, f) b = Mul (a, f) d = Mul (b, f) e = Mul (d, f) k = Mul (e, f) s = Mul (k, f)", {}),
        ("p = Mul (i, c) a = Exp (x) b = Mul (a, p) s = Relu (b)", {"c": np.array(-65504.0)}),
        ("p = Mul (i, c) a = Add (x, p) z = Sub (none, none) b = Div (a, z) s = Add (b, x)", {}),
    ],
    ids=[
        "one",
        "float16's lowest",
        "another repair's",
        "a bias",
        "made smaller",
        "small",
        "scores",
        "no mask",
        "by no constant",
    ],
)
def test_masks_that_float16_holds_stay(text: str, numbers: dict[str, Any]) -> None:
    untouched(masked(text, **numbers), KeepMasks())


def test_a_mask_that_was_softened_is_in_float16() -> None:
    text = "e = Relu (x) b = Cast <to = 9> (m) w = Where (b, e, c) p = Mul (i, c) s = Add (w, p)"
    assert REASON not in reasons(halve(masked(text, c=np.array(-1e9)), repair=True)[1]).values()
