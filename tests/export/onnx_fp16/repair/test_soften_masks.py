from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from export.onnx_fp16.repair.soften_masks import SoftenMasks
from tests.export.onnx_fp16.models import parse
from tests.export.onnx_fp16.repair.same import operators, same, untouched

LOWEST = float(np.finfo(np.float32).min)


def masked(text: str = "h = Sub (one, mask) p = Mul (h, lowest)", opset: int = 17, **numbers: Any) -> onnx.ModelProto:
    weights = {"one": np.array(1.0), "lowest": np.array(-1e12), **numbers}
    graph = f"g (float[3, 8] x, float[3, 8] mask) => (float[3, 8] y) {{ {text} s = Add (x, p) y = Softmax <axis = -1> (s) }}"
    return parse(graph, opset=opset, **weights)


@settings(max_examples=25)
@given(st.sampled_from([-1e9, -1e12, LOWEST]), st.integers(0, 2**24 - 1), st.integers(0, 9))
def test_any_mask_hides_what_it_hid(lowest: float, bits: int, seed: int) -> None:
    mask = np.array([bits >> place & 1 for place in range(24)], np.float32).reshape(3, 8)
    # Float32 itself takes steps of 64 beside -1e9: scores under half of that are lost wholly.
    x = np.random.default_rng(seed).uniform(-30, 30, (3, 8)).astype(np.float32)
    after = same(masked(lowest=np.array(lowest)), SoftenMasks(), {"x": x, "mask": mask})
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
    x = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    mask = np.array([[1] * 8, [1, 0] * 4, [0] * 8], np.float32)
    weights: dict[str, Any] = {"causal": causal, "penalties": -np.arange(8.0), "largest": np.array(1e12)}
    after = same(masked(text, **weights), SoftenMasks(), {"x": x, "mask": mask})
    assert operators(after)[-2 - len(number) :] == [*number, "Where", "Softmax"]


@pytest.mark.parametrize(
    "model",
    [
        masked(lowest=np.array(-10000.0)),
        masked("h = Exp (mask) p = Mul (h, lowest)"),
        parse("g (float[3, 8] x) => (float[3, 8] y) { y = Add (x, lowest) }", lowest=np.array(-1e12)),
        masked(lowest=np.array(-np.inf)),
    ],
    ids=["float16 holds it", "computed, no mask", "no softmax", "minus infinity is the same in float16"],
)
def test_what_is_no_such_mask_stays(model: onnx.ModelProto) -> None:
    untouched(model, SoftenMasks())


def test_others_that_read_the_constant_read_the_old_one() -> None:
    model = parse(
        """g (float[3, 8] x, float[3, 8] mask) => (float[3, 8] y, float[3, 8] z) {
        h = Sub (one, mask) p = Mul (h, lowest) s = Add (x, p) y = Softmax <axis = -1> (s) z = Mul (x, lowest) }""",
        one=np.array(1.0), lowest=np.array(-1e12),
    )  # fmt: skip
    ones = np.ones((3, 8), np.float32)
    same(model, SoftenMasks(), {"x": ones, "mask": ones})


@pytest.mark.parametrize(
    ("between", "shape"), [("t = Mul (s, c)", "3, 8"), ("t = Div (s, c)", "3, 8"), ("t = Unsqueeze (s, axes)", "1, 3, 8")]
)
def test_a_temperature_between_the_mask_and_the_softmax_changes_nothing(between: str, shape: str) -> None:
    weights: dict[str, Any] = {"one": np.array(1.0), "lowest": np.array(-1e12), "c": np.array(0.5 if "Mul" in between else 8.0)}
    graph = f"""g (float[3, 8] x, float[3, 8] mask) => (float[{shape}] y) {{
        h = Sub (one, mask) p = Mul (h, lowest) s = Add (x, p) {between} y = Softmax <axis = -1> (t) }}"""
    model = parse(graph, opset=17, axes=np.array([0], np.int64), **weights)
    x = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    mask = np.array([[1] * 8, [1, 0] * 4, [0] * 8], np.float32)
    assert "Where" in operators(same(model, SoftenMasks(), {"x": x, "mask": mask}))


def test_a_mask_may_be_taken_off() -> None:
    model = parse(
        """g (float[3, 8] x, float[3, 8] mask) => (float[3, 8] y) {
        p = Mul (mask, large) s = Sub (x, p) y = Softmax <axis = -1> (s) }""",
        large=np.array(1e30),
    )
    x = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    mask = np.array([[0] * 8, [1, 0] * 4, [1] * 8], np.float32)
    assert "Neg" in operators(same(model, SoftenMasks(), {"x": x, "mask": mask}))


def test_a_penalty_is_no_mask() -> None:
    model = parse(
        """g (float[3, 8] x, float[3, 8] distance) => (float[3, 8] y) {
        p = Mul (distance, factor) s = Add (x, p) y = Softmax <axis = -1> (s) }""",
        factor=np.array(-1e5),
    )
    after = same(model, SoftenMasks(), {"x": np.zeros((3, 8), np.float32), "distance": np.full((3, 8), 1e-5, np.float32)})
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
    model = parse(
        f"g (float[3, 8] x, float[3, 8] mask) => (float[3, 8] y) {{ h = Sub (one, mask) {text} y = Softmax <axis = -1> (t) }}",
        one=np.array(1.0), lowest=np.array(-1e9), small=np.array(1e-5), large=np.array(1e5),
    )  # fmt: skip
    mask = np.array([[1] * 8, [1, 0] * 4, [0] * 8], np.float32)
    after = same(model, SoftenMasks(), {"x": np.ones((3, 8), np.float32), "mask": mask})
    assert {"p", "t", "y"} <= {node.name for node in after.graph.node if node.metadata_props}


def test_a_mask_that_two_share_is_softened_once() -> None:
    model = parse(
        """g (float[3, 8] x, float[3, 8] mask) => (float[3, 8] y, float[3, 8] z) {
        h = Sub (one, mask) p = Mul (h, lowest) s = Add (x, p) y = Softmax <axis = -1> (s)
        t = Add (y, p) z = Softmax <axis = -1> (t) }""",
        one=np.array(1.0), lowest=np.array(-1e12),
    )  # fmt: skip
    mask = np.array([[1] * 8, [1, 0] * 4, [0] * 8], np.float32)
    after = same(model, SoftenMasks(), {"x": np.ones((3, 8), np.float32), "mask": mask})
    read = {name for node in after.graph.node for name in node.input}
    assert {tensor.name for tensor in after.graph.initializer} <= read


def test_a_mask_that_the_model_gives_out_keeps_its_numbers() -> None:
    model = parse(
        """g (float[3, 8] x, float[3, 8] mask) => (float[3, 8] y, float[3, 8] p) {
        h = Sub (one, mask) p = Mul (h, lowest) s = Add (x, p) y = Softmax <axis = -1> (s) }""",
        one=np.array(1.0), lowest=np.array(-1e12),
    )  # fmt: skip
    mask = np.array([[1] * 8, [1, 0] * 4, [0] * 8], np.float32)
    after = same(model, SoftenMasks(), {"x": np.ones((3, 8), np.float32), "mask": mask})
    assert all("halfserve.keep" in {entry.key for entry in node.metadata_props} for node in after.graph.node)


def test_a_dead_reader_does_not_hide_the_mask() -> None:
    model = masked()
    model.graph.node.add(op_type="Relu", input=["s"], output=["dead"], name="dead")
    mask = np.array([[1] * 8, [1, 0] * 4, [0] * 8], np.float32)
    assert "Where" in operators(same(model, SoftenMasks(), {"x": np.ones((3, 8), np.float32), "mask": mask}))
