from __future__ import annotations

import numpy as np
import pytest

from export.certificate.budget import Budget, adversarial_violations, violations
from export.certificate.figures import Figures
from export.verification.columns import learned, yardstick_of
from export.verification.metrics import Array, compare

RNG = np.random.default_rng(0)
ROWS = 64


def detector(scores: float = 0.9, rows: int = ROWS) -> Array:
    """[2, rows, 22]: boxes of up to 640 beside scores between 0 and 1."""
    boxes = RNG.uniform(8, 640, (2, rows, 4))
    return np.concatenate([boxes, scores * RNG.random((2, rows, 18)) ** 4], axis=-1).astype(np.float32)


def judged(reference: Array, candidate: Array) -> tuple[Figures, list[str]]:
    figures = compare(reference, candidate)
    return figures, violations(figures, Budget(min_agreement=0))


def softmax(logits: Array) -> Array:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True), np.float32)


def halved(values: Array) -> Array:
    return values.astype(np.float16).astype(np.float32)


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("scores", [0.9, 1e-4])
def test_a_detector_whose_scores_are_gone_is_over_budget(axis: int, scores: float) -> None:
    reference = np.moveaxis(detector(scores), 2, axis)
    candidate = np.moveaxis(np.moveaxis(halved(reference), axis, 2) * np.r_[np.ones(4), np.zeros(18)], 2, axis)
    figures, broken = judged(reference, candidate)
    assert (figures.axis, [kind.columns for kind in figures.kinds]) == (axis, [((0, 3),), ((4, 21),)])
    assert any(f"column 4 and 17 more on axis {axis} is 0 throughout" in text for text in broken)
    assert judged(reference, halved(reference))[1] == []


def test_the_worst_column_is_named_with_what_its_error_is_measured_by() -> None:
    reference = detector()
    candidate = reference.copy()
    candidate[..., 0] += 3  # within 0.01 of 640
    candidate[1, 7, 9] += 0.05
    figures, broken = judged(reference, candidate)
    assert figures.worst_kind is not None
    assert figures.worst_kind.worst == 9
    (text,) = broken
    assert text.startswith("max error 0.05 of the scale 1 of column 9 on axis 2")


def test_choices_are_made_among_columns_of_one_kind() -> None:
    reference = detector()
    candidate = reference.copy()
    candidate[..., 4:] = reference[..., :3:-1]
    assert compare(reference, candidate).agreement == pytest.approx(0, abs=0.1)
    assert compare(reference, halved(reference)).agreement == 1


def test_quantities_in_units_of_their_own_are_measured_each_by_its_own() -> None:
    reference = RNG.normal(size=(ROWS, 4)) * [1e4, 50, 1e-1, 1e-4]
    assert len(learned([reference]).kinds) == 4
    for column in range(4):
        candidate = reference.copy()
        candidate[:, column] *= 1.05
        figures, broken = judged(reference, candidate)
        assert figures.worst_kind is not None
        assert figures.worst_kind.worst == column
        assert len(broken) == 1
    assert judged(reference, halved(reference))[1] == []


def test_a_column_far_below_the_others_must_not_vanish_even_on_few_samples() -> None:
    reference = np.random.default_rng(1).normal(size=(2, 8)).astype(np.float32) * np.r_[np.ones(7), 1e-9].astype(np.float32)
    _, (vanished,) = judged(reference, halved(reference))
    assert vanished.startswith("column 7 on axis 1 is 0 throughout and up to")


@pytest.mark.parametrize("classes", [3, 1000])
def test_classes_that_no_sample_belongs_to_do_not_refuse_a_classifier(classes: int) -> None:
    logits = np.random.default_rng(2).normal(size=(ROWS, classes)).astype(np.float32) * 3
    logits[:, 0] += 12
    logits[:, -1] -= 25
    for reference in (softmax(logits), np.log(softmax(logits))):
        figures, broken = judged(reference, halved(reference))
        assert (broken, figures.kinds) == ([], ())


@pytest.mark.parametrize("rows", [2, ROWS])
def test_logits_that_are_small_by_chance_are_no_kind_of_their_own(rows: int) -> None:
    signal = np.random.default_rng(3).normal(size=(rows, 8)) * 1e-3
    reference = np.r_[0.1, -0.08, 0.05, 0.02, -0.06, 0.09, 0.07, 2e-3] + signal
    assert judged(reference, reference + 2e-4 * np.sign(signal))[1] == []


def test_columns_of_zeros_must_stay_near_zero() -> None:
    reference = np.concatenate([RNG.normal(size=(ROWS, 6)), np.zeros((ROWS, 2))], -1)
    assert judged(reference, reference + 1e-3)[1] == []
    assert len(judged(reference, reference + 0.1 * (reference == 0))[1]) == 1


def test_a_channel_that_hardly_fires_is_no_vanished_one() -> None:
    reference = np.maximum(RNG.normal(size=(4, 6, 5, 5)) - np.r_[0, 0, 0, 0, 0, 9].reshape(6, 1, 1), 0)
    reference[1, 5, 2, 2] = 1e-4
    candidate = reference.copy()
    candidate[:, 5] = 0
    assert judged(reference, candidate)[0].vanished is None


@pytest.mark.parametrize("largest", [1e-9, 1e-7, 3e-6, 1.0])
def test_an_output_that_becomes_zero_is_over_budget_however_small(largest: float) -> None:
    reference = RNG.uniform(-largest, largest, (ROWS, 1))
    figures, (text,) = judged(reference, np.zeros_like(reference))
    assert figures.vanished is not None
    assert figures.vanished.axis is None
    assert text.startswith("the output is 0 throughout and up to")
    assert violations(figures, Budget(max_abs_error=2.0)) == []


def test_other_samples_are_measured_by_the_kinds_of_the_usual_ones() -> None:
    reference = detector()
    yardstick = yardstick_of(compare(reference, reference))
    other = reference[:1, :1] / 100  # whose own kinds one row does not tell
    sound = compare(other, halved(other), yardstick.for_other_samples(other))
    assert adversarial_violations(sound, 640, Budget()) == []
    broken = other + np.r_[np.zeros(4), np.full(18, 0.2)].astype(np.float32)
    (text,) = adversarial_violations(compare(other, broken, yardstick.for_other_samples(other)), 640, Budget())
    assert text.startswith("max error 0.2 in column")
