"""Class 4: masks made of numbers that float16 does not have, and rows that are masked from end to end."""

from __future__ import annotations

import numpy as np
import pytest

from tests.export.failure_classes.converters import Converter, both, normal, parse

LOWEST = np.finfo(np.float32).min
MASK = np.array([[1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0, 0]], np.float32)


@both
@pytest.mark.parametrize("lowest", [-1e12, -1e9, LOWEST])
def test_an_added_mask(lowest: float, converter: Converter) -> None:
    model = parse("""g (float[3, 8] x, float[3, 8] mask) => (float[3, 8] y) {
        hidden = Sub (one, mask)
        penalty = Mul (hidden, lowest)
        scores = Add (x, penalty)
        y = Softmax <axis = -1> (scores) }""",
        one=np.float32(1), lowest=np.float32(lowest))  # fmt: skip
    converter.try_on(model, {"x": normal(3, 8, scale=10), "mask": MASK})


@both
@pytest.mark.parametrize("lowest", [-1e12, LOWEST])
def test_two_masks_added(lowest: float, converter: Converter) -> None:
    constant = np.where(MASK == 0, np.float32(lowest) / 2, np.float32(0)).astype(np.float32)
    model = parse("""g (float[3, 8] x, float[3, 8] mask) => (float[3, 8] y) {
        hidden = Sub (one, mask)
        penalty = Mul (hidden, lowest)
        both = Add (penalty, constant)
        scores = Add (x, both)
        y = Softmax <axis = -1> (scores) }""",
        one=np.float32(1), lowest=np.float32(lowest / 2), constant=constant)  # fmt: skip
    converter.try_on(model, {"x": normal(3, 8, scale=10), "mask": MASK})


@both
@pytest.mark.parametrize("lowest", [-1e12, LOWEST])
def test_a_chosen_mask_beside_scores_under_minus_ten_thousand(lowest: float, converter: Converter) -> None:
    model = parse("""g (float[3, 8] x, bool[3, 8] mask) => (float[3, 8] y) {
        scores = Where (mask, x, lowest)
        y = Softmax <axis = -1> (scores) }""", lowest=np.float32(lowest))  # fmt: skip
    # A library that clamps to -10,000 lets the masked places win here.
    converter.try_on(model, {"x": normal(3, 8) - 12000, "mask": MASK > 0})


@both
def test_minus_infinity_that_the_model_looks_for(converter: Converter) -> None:
    constant = np.where(np.tri(8) == 0, -np.inf, 0).astype(np.float32)
    model = parse("""g (float[8, 8] x) => (float[8, 8] y, bool[8, 8] hidden) {
        scores = Add (x, mask)
        hidden = IsInf (scores)
        y = Softmax <axis = -1> (scores) }""", mask=constant)  # fmt: skip
    converter.try_on(model, {"x": normal(8, 8)})
