from __future__ import annotations

import numpy as np
import pytest

from halfserve.export.certificate.budget import Budget
from halfserve.export.tasks.judges import judge_decoded, judge_embeddings, judge_token_labels, judge_token_vectors
from halfserve.export.verification.samples import Array

RANDOM = np.random.default_rng(0)
ROWS = RANDOM.standard_normal((40, 16))
BUDGET = Budget()


def in_batches(rows: Array) -> list[Array]:
    return [rows[:30], rows[30:]]


def test_equal_embeddings_have_cosine_1_and_keep_all_neighbours() -> None:
    cosine, kept = judge_embeddings([], in_batches(ROWS), in_batches(ROWS * 2), BUDGET)
    assert cosine.value == pytest.approx(1.0)
    assert kept.value == 1.0
    assert cosine.violation is None
    assert kept.violation is None


def test_one_turned_embedding_is_over_the_limit_of_the_cosine() -> None:
    turned = ROWS.copy()
    turned[33] = RANDOM.standard_normal(16)
    cosine, kept = judge_embeddings([], in_batches(ROWS), in_batches(turned), BUDGET)
    assert cosine.violation is not None
    assert cosine.violation.startswith("least cosine")
    assert kept.value < 1.0


def test_neighbours_that_change_places_are_counted() -> None:
    # All rows nearly the same: their order is in what little they differ.
    base = RANDOM.standard_normal(64)
    rows = base + 0.3 * RANDOM.standard_normal((60, 64))
    noisy = rows + 0.02 * RANDOM.standard_normal((60, 64))
    cosine, kept = judge_embeddings([], [rows], [noisy], BUDGET)
    assert cosine.violation is None
    assert kept.violation is not None
    assert kept.violation.startswith("nearest 10 kept")


def test_neighbours_that_are_equally_near_may_change_places() -> None:
    rows = np.ones((30, 8)) + 1e-6 * RANDOM.standard_normal((30, 8))
    _, kept = judge_embeddings([], [rows], [rows + 1e-6 * RANDOM.standard_normal((30, 8))], BUDGET)
    assert kept.value == 1.0


def test_not_a_number_is_over_the_limit() -> None:
    broken = ROWS.copy()
    broken[0] = np.nan
    assert judge_embeddings([], [ROWS], [broken], BUDGET)[0].violation is not None


def test_a_single_sample_has_no_neighbours() -> None:
    assert [figure.name for figure in judge_embeddings([], [ROWS[:1]], [ROWS[:1]], BUDGET)] == ["least cosine"]


def test_masked_tokens_are_left_out() -> None:
    tokens = RANDOM.standard_normal((2, 5, 8))
    other = tokens.copy()
    other[:, 3:] = -other[:, 3:]
    masked = [{"attention_mask": np.array([[1, 1, 1, 0, 0]] * 2)}]
    unmasked = [{"input_ids": np.zeros((2, 5), np.int64)}]
    for judge in (judge_token_vectors, judge_token_labels):
        assert judge(masked, [tokens], [other], BUDGET)[0].value == pytest.approx(1.0)
        assert judge(unmasked, [tokens], [other], BUDGET)[0].violation is not None


def test_the_share_of_labels_has_the_users_limit() -> None:
    tokens = RANDOM.standard_normal((1, 100, 4))
    other = tokens.copy()
    other[0, 7] = -other[0, 7]
    assert judge_token_labels([{}], [tokens], [other], Budget(min_agreement=0.98))[0].violation is None
    assert judge_token_labels([{}], [tokens], [other], Budget(min_agreement=1.0))[0].violation is not None


def logits_of(*rows: str) -> Array:
    """Time steps of clips as one letter each: _ is CTC's blank."""
    return np.eye(5)[[["_abcd".index(letter) for letter in row] for row in rows]]


@pytest.mark.parametrize(
    ("actual", "kept"),
    [
        ("_aab_b", 1.0),  # a, b, b
        ("a_b_bb", 1.0),
        ("aaabbb", 2 / 3),  # a, b: one is lost
        ("aab_bc", 2 / 3),  # a, b, b, c: one too many
        ("______", 0.0),
    ],
)
def test_speech_is_judged_by_its_decoded_tokens(actual: str, kept: float) -> None:
    (figure,) = judge_decoded([], [logits_of("_aab_b")], [logits_of(actual)], BUDGET, blank=0)
    assert figure.value == pytest.approx(kept)
    assert (figure.violation is None) == (kept == 1.0)


def test_silence_is_decoded_alike() -> None:
    (figure,) = judge_decoded([], [logits_of("____")], [logits_of("____")], BUDGET, blank=0)
    assert figure.value == 1.0
