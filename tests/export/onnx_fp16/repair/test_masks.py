from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfserve.export.onnx_fp16.convert import convert_float_to_float16
from halfserve.export.onnx_fp16.repair.masks import KEEP_MASKS, OUTGROWN_REASON, SOFTEN_MASKS
from halfserve.export.verification.simulation import round_every_node
from tests.export.conversions.runtime import Session
from tests.export.onnx_fp16.models import halve, normal, reasons
from tests.export.onnx_fp16.repair.same import assert_untouched, operators, repaired, same
from tests.export.stored_models import parse

LOWEST = float(np.finfo(np.float32).min)
MASK = np.array([[1] * 8, [1, 0] * 4, [0] * 8], np.float32)
MADE = "h = Sub (one, mask) p = Mul (h, lowest)"


def net(text: str, results: str = "float[3, 8] y", opset: int = 20, **numbers: Any) -> onnx.ModelProto:
    weights = {"one": np.array(1.0), "lowest": np.array(-1e12), **numbers}
    return parse(f"g (float[3, 8] x, float[3, 8] mask) => ({results}) {{ {text} }}", opset=opset, **weights)


def masked(text: str = MADE, **numbers: Any) -> onnx.ModelProto:
    return net(f"{text} s = Add (x, p) y = Softmax <axis = -1> (s)", opset=17, **numbers)


def softened(model: onnx.ModelProto, mask: np.ndarray[Any, Any] = MASK) -> onnx.ModelProto:
    return same(model, SOFTEN_MASKS, {"x": normal(3, 8), "mask": mask})


@settings(max_examples=25)
@given(st.sampled_from([-1e9, -1e12, LOWEST]), st.integers(0, 2**24 - 1), st.integers(0, 9))
def test_any_mask_hides_what_it_hid(lowest: float, bits: int, seed: int) -> None:
    mask = np.array([bits >> place & 1 for place in range(24)], np.float32).reshape(3, 8)
    # Float32 itself takes steps of 64 beside -1e9: scores under half of that are lost wholly.
    x = np.random.default_rng(seed).uniform(-30, 30, (3, 8)).astype(np.float32)
    after = same(masked(lowest=np.array(lowest)), SOFTEN_MASKS, {"x": x, "mask": mask})
    numbers = [onnx.numpy_helper.to_array(tensor) for tensor in after.graph.initializer]
    assert min(float(number.min()) for number in numbers) >= -65504, "float16 holds every number"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("h = Sub (one, mask) p = Mul (h, lowest)", ["Less", "Max"]),
        ("b = Cast <to = 9> (mask) zero = Constant <value_float = 0.0> () p = Where (b, zero, lowest)", ["Less", "Max"]),
        ("h = Sub (one, mask) q = Mul (h, lowest) p = Add (q, causal)", ["Less", "Less", "Where"]),
        ("h = Sub (one, mask) q = Mul (h, lowest) p = Add (q, penalties)", ["Less", "Less", "Where"]),
        ("h = Sub (one, mask) q = Mul (h, largest) p = Sub (penalties, q)", ["Less", "Less", "Where"]),
        ("p = Identity (causal)", ["Less", "Max"]),
    ],
)
def test_masks_are_made_in_many_ways(text: str, number: list[str]) -> None:
    causal = np.where(np.tri(3, 8) > 0, 0, -1e12)
    weights: dict[str, Any] = {"causal": causal, "penalties": -np.arange(8.0), "largest": np.array(1e12)}
    after = softened(masked(text, **weights))
    assert operators(after)[-2 - len(number) :] == [*number, "Where", "Softmax"]


@pytest.mark.parametrize(
    "model",
    [
        masked(lowest=np.array(-10000.0)),
        masked("h = Exp (mask) p = Mul (h, lowest)"),
        net("y = Add (x, lowest)"),
        masked(lowest=np.array(-np.inf)),
    ],
    ids=["float16 holds it", "computed, no mask", "no softmax", "minus infinity is the same in float16"],
)
def test_what_is_no_such_mask_stays(model: onnx.ModelProto) -> None:
    assert_untouched(model, SOFTEN_MASKS)


def test_others_that_read_the_constant_read_the_old_one() -> None:
    text = f"{MADE} s = Add (x, p) y = Softmax <axis = -1> (s) z = Mul (x, lowest)"
    softened(net(text, "float[3, 8] y, float[3, 8] z"), np.ones((3, 8), np.float32))


@pytest.mark.parametrize(
    ("between", "shape"), [("t = Mul (s, c)", "3, 8"), ("t = Div (s, c)", "3, 8"), ("t = Unsqueeze (s, axes)", "1, 3, 8")]
)
def test_a_temperature_between_the_mask_and_the_softmax_changes_nothing(between: str, shape: str) -> None:
    weights: dict[str, Any] = {"c": np.array(0.5 if "Mul" in between else 8.0), "axes": np.array([0], np.int64)}
    text = f"{MADE} s = Add (x, p) {between} y = Softmax <axis = -1> (t)"
    assert "Where" in operators(softened(net(text, f"float[{shape}] y", 17, **weights)))


def test_a_mask_may_be_taken_off() -> None:
    model = net("p = Mul (mask, large) s = Sub (x, p) y = Softmax <axis = -1> (s)", large=np.array(1e30))
    assert "Neg" in operators(softened(model, MASK[::-1]))


def test_a_penalty_is_no_mask() -> None:
    model = parse(
        """g (float[3, 8] x, float[3, 8] distance) => (float[3, 8] y) {
        p = Mul (distance, factor) s = Add (x, p) y = Softmax <axis = -1> (s) }""",
        factor=np.array(-1e5),
    )
    after = same(model, SOFTEN_MASKS, {"x": np.zeros((3, 8), np.float32), "distance": np.full((3, 8), 1e-5, np.float32)})
    marks = {node.name: "".join(entry.value for entry in node.metadata_props) for node in after.graph.node}
    assert marks == dict.fromkeys("psy", "a mask or penalty whose numbers float16 cannot hold")


@pytest.mark.parametrize(
    "text",
    [
        "q = Mul (h, lowest) p = Mul (q, small) t = Add (x, p)",
        "p = Mul (h, lowest) s = Add (x, p) t = Mul (s, small)",
        "p = Mul (h, lowest) s = Add (x, p) t = Div (s, large)",
        "p = Mul (h, lowest) s = Add (x, p) t = Div (s, small)",
    ],
)
def test_a_mask_that_is_scaled_down_or_up_hides_in_float32(text: str) -> None:
    numbers: dict[str, Any] = {"lowest": np.array(-1e9), "small": np.array(1e-5), "large": np.array(1e5)}
    after = softened(net(f"h = Sub (one, mask) {text} y = Softmax <axis = -1> (t)", **numbers))
    assert {"p", "t", "y"} <= {node.name for node in after.graph.node if node.metadata_props}


def test_a_mask_that_two_share_is_softened_once() -> None:
    text = f"{MADE} s = Add (x, p) y = Softmax <axis = -1> (s) t = Add (y, p) z = Softmax <axis = -1> (t)"
    after = softened(net(text, "float[3, 8] y, float[3, 8] z"))
    read = {name for node in after.graph.node for name in node.input}
    assert {tensor.name for tensor in after.graph.initializer} <= read


def test_a_mask_that_the_model_gives_out_keeps_its_numbers() -> None:
    after = softened(net(f"{MADE} s = Add (x, p) y = Softmax <axis = -1> (s)", "float[3, 8] y, float[3, 8] p"))
    assert all("halfserve.keep" in {entry.key for entry in node.metadata_props} for node in after.graph.node)


def test_a_dead_reader_does_not_hide_the_mask() -> None:
    model = masked()
    model.graph.node.add(op_type="Relu", input=["s"], output=["dead"], name="dead")
    assert "Where" in operators(softened(model))


HIDDEN = "h = Cast <to = 1> (m) i = Sub (one, h) "


def hidden(text: str, **numbers: Any) -> onnx.ModelProto:
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
    model = hidden(text, **numbers)
    after, repairs = repaired(model, KEEP_MASKS)
    assert [node.op_type for node in after.graph.node] == [node.op_type for node in model.graph.node], "nothing but marks"
    assert sorted(name for repair in repairs for name in repair.nodes) == sorted(names)
    report = halve(model, repair=True)[1]
    assert {name for name, reason in reasons(report).items() if reason == OUTGROWN_REASON} == set(names)


@pytest.mark.parametrize(("text", "names", "numbers"), [*OUTGROWN, (OUTGROWN[4][0], "", {"c": np.array(-1e9)})])
def test_a_row_that_is_hidden_whole_stays_finite(text: str, names: str, numbers: dict[str, Any]) -> None:
    model, feeds = hidden(text, **numbers), {"x": normal(3, 8), "m": MASK.astype(np.int64)}
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
    assert_untouched(hidden(text, **numbers), KEEP_MASKS)


def test_a_mask_that_was_softened_is_in_float16() -> None:
    text = "e = Relu (x) b = Cast <to = 9> (m) w = Where (b, e, c) p = Mul (i, c) s = Add (w, p)"
    assert OUTGROWN_REASON not in reasons(halve(hidden(text, c=np.array(-1e9)), repair=True)[1]).values()


# A mask that every layer of a transformer reads.


@pytest.mark.parametrize("layers", [2, 3, 5])
def test_each_softmax_that_shares_a_mask_is_repaired(layers: int) -> None:
    body = " ".join(f"s{i} = Add (x{i}, p) x{i + 1} = Softmax <axis = -1> (s{i})" for i in range(layers))
    after = softened(net(f"x0 = Identity (x) {MADE} {body} y = Identity (x{layers})", lowest=np.array(-1e9)))
    assert operators(after).count("Where") == layers
    assert {name for node in after.graph.node for name in node.input} >= {tensor.name for tensor in after.graph.initializer}
