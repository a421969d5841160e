"""Errors are relative to columns of about their own size."""

from __future__ import annotations

import numpy as np
import pytest

from halfserve.serve.engine.precision_guard.column_errors import OutputErrors
from halfserve.serve.engine.tensors import Array

ROWS = 16


def columns(*sizes: float) -> Array:
    """FP32 [ROWS, columns] of these sizes, of both signs."""
    random = np.random.default_rng(0)
    return np.asarray(np.array(sizes) * random.choice([-1, 1], (ROWS, len(sizes))), np.float32)


def relative(reference: Array, column: int, error: float, *open_axes: int) -> float:
    """The largest relative error where one column of the last axis is wrong in one place."""
    answer = reference.copy()
    answer[3, ..., column] += error
    errors: OutputErrors[str] = OutputErrors(open_axes)
    errors.add(reference, answer, "pair")
    worst = errors.worst()
    assert worst is not None
    return worst.relative


def test_an_error_is_judged_by_columns_of_its_size() -> None:
    reference = columns(1e4, 2, 1, 0.25)
    assert relative(reference, 1, 0.1) == pytest.approx(0.05)
    assert relative(reference, 3, 0.1) == pytest.approx(0.05, rel=1e-3), "the small one may be near 0 by chance"
    assert relative(reference, 0, 0.1) == pytest.approx(1e-5, rel=0.1)


def test_a_column_of_zeros_is_judged_as_most_columns_are() -> None:
    assert relative(columns(1e4, 1, 1, 0), 3, 0.1) == pytest.approx(0.1)
    assert relative(np.zeros((ROWS, 2), np.float32), 0, 2.0**-14) == pytest.approx(1), "of which float16 has few digits"


def test_few_values_separate_only_what_is_far_apart() -> None:
    few = columns(100, 1)[:4]
    assert relative(few, 1, 0.1) == pytest.approx(0.001)
    assert relative(few * np.array([100, 1], np.float32), 1, 0.1) == pytest.approx(0.1)


def test_rare_classes_are_judged_as_the_others_are() -> None:
    logits = columns(0, 9, 20)
    shares = np.exp(-np.abs(logits)) / np.exp(-np.abs(logits)).sum(1, keepdims=True)
    assert relative(shares, 2, 1e-4) == pytest.approx(1e-4, rel=0.1)
    assert relative(np.log(shares), 0, 0.1) == pytest.approx(0.1 / 20, rel=0.1), "log-probabilities"


def test_columns_lie_along_every_axis_of_one_size() -> None:
    images = np.stack([columns(1, 1, 1), columns(1e4, 1e4, 1e4)], axis=1)  # [ROWS, 2, 3]
    answer = images.copy()
    answer[0, 0, 0] += 0.1
    errors: OutputErrors[str] = OutputErrors([2])
    errors.add(images, answer, "first")
    errors.add(images[..., :2], images[..., :2], "of another length")
    worst = errors.worst()
    assert worst is not None
    assert (worst.axis, worst.column, worst.label) == (1, 0, "first")
    assert worst.relative == pytest.approx(0.1)


def test_only_one_finite_value_is_an_infinite_error() -> None:
    reference = columns(1, 1)
    reference[0] = [np.nan, np.inf]
    assert relative(reference, 0, 0.0) == 0
    assert relative(reference, 0, np.nan) == np.inf
