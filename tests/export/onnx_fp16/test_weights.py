from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from hypothesis.extra.numpy import arrays

from halfserve.export.half_types import FP16, FP16_MAX, FP16_OVERFLOW, WeightLedger, ledger_of
from halfserve.export.onnx_fp16.planning.weights import scan
from tests.export.onnx_fp16.models import FLOAT, FLOAT16, halve, judged, normal, reasons, run, types
from tests.export.stored_models import parse


def test_a_weight_beyond_the_range_is_never_clamped() -> None:
    model = parse(
        "g (float[2, 3] x) => (float[2, 3] y) { r = Relu (x) m = Mul (r, w) d = Div (m, w) y = Neg (d) }", w=[1.0, 9.8e7, 3]
    )
    converted = judged(model, {"x": normal(2, 3)})
    assert types(converted)["w"] == FLOAT
    _, report = halve(model)
    assert set(reasons(report)) == {"m", "d"}
    assert reasons(report)["m"] == "constant 'w' reaches 9.8e+07; float16 ends at 65504"
    (weight,) = report.weights
    assert (weight.name, weight.elements, weight.ledger.overflow, weight.action) == ("w", 3, 1, "kept")
    assert report.ledger.overflow == 0


def test_a_constant_that_would_vanish_keeps_its_node() -> None:
    model = parse("g (float[3] x) => (float[3] y) { a = Abs (x) b = Add (a, e) y = Div (x, b) }", e=1e-12)
    kept = reasons(halve(model)[1])
    assert kept == {"b": "constant 'e' is at most 1e-12; float16 rounds that to zero"}


def test_a_constant_is_followed_through_what_moves_it() -> None:
    model = parse(
        "g (float[2, 3] x) => (float[2, 3] y) { u = Unsqueeze (e, axis) v = Expand (u, shape) b = Mul (x, v) y = Neg (b) }",
        e=1e-12,
        axis=np.array([0]),
        shape=np.array([2, 3]),
    )
    assert set(reasons(halve(model)[1])) == {"u", "v", "b"}


@pytest.mark.parametrize("bound", [3.4e38, 1e6])
def test_a_bound_beyond_the_range_bounds_nothing(bound: float) -> None:
    model = parse("g (float[4] x) => (float[4] y) { y = Clip (x, low, high) }", low=0.0, high=bound)
    judged(model, {"x": np.array([-3, 0.5, 1e4, 6e4], np.float32)})
    assert halve(model)[1].kept == ()


@pytest.mark.parametrize("low", [-3.4028235e38, -1e12, -1e9])
def test_a_mask_before_a_softmax_may_saturate(low: float) -> None:
    mask = np.array([[0, low, 0, low]], np.float32)
    model = parse("""g (float[2, 4] x) => (float[2, 4] y) { u = Unsqueeze (m, a) q = Squeeze (u, a)
        s = Add (x, q) y = Softmax (s) }""",
                  m=mask, a=np.array([0]))  # fmt: skip
    converted = judged(model, {"x": normal(2, 4)})
    (stored,) = [tensor for tensor in converted.graph.initializer if tensor.name == "m"]
    assert stored.data_type == FLOAT16
    assert np.frombuffer(stored.raw_data, np.float16).min() == -65504
    assert [weight.action for weight in halve(model)[1].weights] == ["saturated"]


def test_the_same_mask_anywhere_else_may_not() -> None:
    model = parse("g (float[2, 4] x) => (float[2, 4] y) { s = Add (x, m) y = Relu (s) }", m=np.full(4, -1e9, np.float32))
    assert set(reasons(halve(model)[1])) == {"s"}


@pytest.mark.parametrize("kind", ["int64", "bool"])
def test_a_mask_made_of_integers_may_saturate(kind: str) -> None:
    mask = "k = Cast <to = 1> (i) h = Sub (one, k) p = Mul (h, low)"
    model = parse(
        f"g (float[2, 4] x, {kind}[2, 4] i) => (float[2, 4] y) {{ {mask} s = Add (x, p) y = Softmax (s) }}", one=1.0, low=-1e9
    )
    assert halve(model)[1].kept == ()


@pytest.mark.parametrize(("factor", "saturates"), [(1e-4, False), (2.0, False), (0.125, True), ([1.0, 0, 0.5, -1], True)])
def test_a_mask_saturates_where_it_hides_after_its_factor_too(factor: float | list[float], *, saturates: bool) -> None:
    body = "w = Where (b, x, low) t = Mul (w, k) y = Softmax (t)"
    model = parse(f"g (float[2, 4] x, bool[2, 4] b) => (float[2, 4] y) {{ {body} }}", low=-1e9, k=factor)
    converted = judged(model, {"x": normal(2, 4), "b": np.array([[True, False, True, False], [False] * 4])})
    assert types(converted)["low"] == (FLOAT16 if saturates else FLOAT)
    assert set(reasons(halve(model)[1])) == (set() if saturates else {"w", "t", "y"})


def test_a_temperature_is_no_mask() -> None:
    model = parse("g (float[2, 4] x) => (float[2, 4] y) { t = Mul (x, k) y = Softmax (t) }", k=1e6)
    kept = reasons(halve(model)[1])
    assert kept["t"] == "constant 'k' reaches 1e+06; float16 ends at 65504"
    judged(model, {"x": np.array([[1e-6, 2e-6, 0, 0], [3e-6, 0, 1e-6, 0]], np.float32)})


def test_infinities_and_nan_are_numbers_of_float16() -> None:
    model = parse("g (float[3] x) => (float[3] y) { y = Max (x, w) }", w=[-np.inf, np.nan, 1.0])
    converted = judged(model, {"x": normal(3)})
    assert types(converted)["w"] == FLOAT16


def test_a_fill_beyond_the_range_is_kept() -> None:
    model = parse(
        "g (int64[1] n, float[N] x) => (float[N] y) { f = ConstantOfShape <value = float[1] {1e9}> (n) y = Mul (x, f) }"
    )
    assert set(reasons(halve(model)[1])) == {"f", "y"}


@pytest.mark.parametrize(
    ("attributes", "kept"),
    [
        ("value: float = 1e6", {"p", "y"}),
        ("value: float = -1e-9", {"p", "y"}),
        ("value: float = 2.0", set()),
        ('value: float = 1e6, mode = "edge"', set()),
    ],
)
def test_the_number_that_an_old_pad_fills_with_is_a_constant(attributes: str, kept: set[str]) -> None:
    body = f"p = Pad <pads = [0, 0, 0, 2], {attributes}> (x) y = Mul (p, k)"
    model = parse(f"g (float[2, 3] x) => (float[2, 5] y) {{ {body} }}", opset=9, ir=4, k=0.5)
    judged(model, {"x": normal(2, 3)})
    assert set(reasons(halve(model)[1])) == kept


GUARD = "i = IsInf (x) p = Greater (x, zero) c = And (p, i) y = Where (c, lot, x)"


@pytest.mark.parametrize("opset", [18, 20])
@pytest.mark.parametrize("body", [GUARD, "i = IsInf (x) c = Not (i) y = Where (c, x, lot)"])
def test_what_stands_for_infinity_is_the_largest_number_of_the_type(body: str, opset: int) -> None:
    weights: dict[str, Any] = {"zero": 0.0, "lot": np.finfo(np.float32).max}
    used = {name: number for name, number in weights.items() if name in body}
    model = parse(f"g (float[3] x) => (float[3] y) {{ {body} }}", opset=opset, **used)
    converted, report = halve(model, keep_io_types=False)
    assert "y" not in reasons(report)
    assert run(converted, x=[1.0, 2.0, np.inf])[0].tolist() == [1.0, 2.0, 65504.0]


@pytest.mark.parametrize(
    "body",
    [
        GUARD.replace("IsInf", "IsNaN"),
        GUARD.replace("lot", "much"),
        "i = IsInf (x) c = Cast <to = 1> (i) y = Mul (c, lot)",
    ],
)
def test_another_large_number_is_kept(body: str) -> None:
    weights: dict[str, Any] = {"zero": 0.0, "lot": np.finfo(np.float32).max, "much": 1e6}
    used = {name: number for name, number in weights.items() if name in body}
    assert "y" in reasons(halve(parse(f"g (float[3] x) => (float[3] y) {{ {body} }}", **used))[1])


def test_the_ledger_counts_what_rounding_did() -> None:
    weights = [1.0, 1e-9, -2e-8, 1e-6, 6e4, 0.0]
    _, report = halve(parse("g (float[6] x) => (float[6] y) { y = Mul (x, w) }", w=weights))
    (weight,) = report.weights
    assert weight.ledger == ledger_of(np.array(weights, np.float32))
    assert (weight.ledger.flushed, weight.ledger.subnormal, weight.action) == (2, 1, "halved")
    assert report.to_json()["ledger"] == {"overflow": 0, "flushed": 2, "subnormal": 1}
    assert report.to_json()["actions"] == {"halved": 1}


def test_a_weight_that_rounding_does_nothing_to_is_only_counted() -> None:
    _, report = halve(parse("g (float[3] x) => (float[3] y) { y = Mul (x, w) }", w=[1.0, 2.0, 0.5]))
    assert (report.weights, report.rounded) == ((), 1)


FLOATS = arrays(np.float32, st.integers(0, 40), elements=st.floats(width=32, allow_nan=True, allow_infinity=True))


@given(FLOATS)
def test_a_scan_sees_what_rounding_does(values: np.ndarray) -> None:
    known = scan(onnx_ir.tensor(values))
    half = FP16.narrowed(values)
    finite = np.isfinite(values)
    assert known.vanishes == bool((values != 0).any() and not half.any())
    assert known.ledger.flushed == int(((values != 0) & (half == 0)).sum())
    assert known.overflows == bool((np.abs(values[finite]) > 65504).any())
    if not known.overflows:
        np.testing.assert_allclose(half[finite], values[finite], rtol=2**-11, atol=2**-25)


@given(FLOATS)
def test_saturation_leaves_nothing_infinite_that_was_finite(values: np.ndarray) -> None:
    half = FP16.narrowed(values, saturate=True)
    assert np.isfinite(half[np.isfinite(values)]).all()
    np.testing.assert_array_equal(half[~np.isfinite(values)], values[~np.isfinite(values)].astype(np.float16))


finite = hnp.arrays(np.float32, st.integers(0, 30), elements=st.floats(-(2.0**20), 2.0**20, width=32))


@given(finite)
def test_it_counts_what_rounding_does(values: np.ndarray[Any, Any]) -> None:
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float16)
    counted = ledger_of(values)
    assert counted.flushed == np.count_nonzero((values != 0) & (rounded == 0))
    assert counted.subnormal == np.count_nonzero((rounded != 0) & (np.abs(values) < 2.0**-14))
    assert counted.overflow == np.count_nonzero(np.abs(values) > FP16_MAX) >= np.count_nonzero(np.isinf(rounded))


def test_the_edges() -> None:
    edges = np.array([0, 2.0**-25, np.nextafter(2.0**-25, 1), 2.0**-14, 65504, 65505, np.inf, np.nan])
    assert ledger_of(edges) == WeightLedger(overflow=1, flushed=1, subnormal=1)
    with np.errstate(over="ignore"):
        assert np.isinf(np.float16(FP16_OVERFLOW))
        assert np.float16(np.nextafter(FP16_OVERFLOW, 0)) == FP16_MAX


def test_ledgers_add_up() -> None:
    assert WeightLedger(overflow=1, flushed=2) + WeightLedger(flushed=3, subnormal=4) == WeightLedger(
        overflow=1, flushed=5, subnormal=4
    )
