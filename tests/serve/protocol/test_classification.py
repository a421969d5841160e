from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from serve.engine.errors import InvalidArgumentError
from serve.protocol.classification import MANY, MAX_NAMED, classify


def test_the_best_classes_of_every_row_in_words() -> None:
    scores = np.array([[0.25, 1.5, -2.0], [3.0, 3.0, 1.0]], np.float16)
    named = classify(scores, 2, ["cat", "dog"], batched=True)
    assert named.tolist() == [[b"1.500000:1:dog", b"0.250000:0:cat"], [b"3.000000:0:cat", b"3.000000:1:dog"]]


def test_many_equal_scores_come_by_their_index() -> None:
    scores = np.array([[1, 2] * 50])  # more than what sorts keep in order anyway
    named = classify(scores, 100, (), batched=True)
    assert [int(text.split(b":")[1]) for text in named[0]] == [*range(1, 100, 2), *range(0, 100, 2)]


def test_without_a_batch_there_is_one_list() -> None:
    assert classify(np.array([7, 9, 8]), 9, (), batched=False).tolist() == [b"9:1", b"8:2", b"7:0"]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.int64, np.uint64])
def test_whole_numbers_are_ranked_as_they_are(dtype: type[np.integer[Any]]) -> None:
    most, least = np.iinfo(dtype).max, np.iinfo(dtype).min
    named = classify(np.array([least, most - 1, most, 3, most], dtype), 5, (), batched=False)
    assert named.tolist() == [f"{v}:{i}".encode() for v, i in ((most, 2), (most, 4), (most - 1, 1), (3, 3), (least, 0))]


def test_what_is_no_number_is_never_the_best() -> None:
    scores = np.array([[np.nan, -np.inf, 1.0]], np.float32)
    assert classify(scores, 3, (), batched=True).tolist() == [[b"1.000000:2", b"-inf:1", b"nan:0"]]


@pytest.mark.filterwarnings("error")
def test_a_nan_of_the_signalling_kind_is_a_nan_like_others() -> None:
    scores = np.array([0x7F800001, 0x3F800000] * 8, np.uint32).view(np.float32)
    assert classify(scores, 9, (), batched=False).tolist()[6:] == [b"1.000000:13", b"1.000000:15", b"nan:0"]


@given(hnp.arrays(np.float32, st.tuples(st.integers(0, 3), st.integers(1, 5), st.integers(1, 3))), st.integers(1, 20))
def test_every_class_comes_once_and_in_order(scores: np.ndarray[Any, Any], count: int) -> None:
    named = classify(scores, count, (), batched=True)
    classes = scores[0].size if len(scores) else scores.shape[1] * scores.shape[2]
    assert named.shape == (len(scores), min(count, classes))
    for row, best in zip(scores.reshape(len(scores), classes), named, strict=True):
        indices = [int(text.split(b":")[1]) for text in best]
        assert len(set(indices)) == len(indices)
        values = row[indices]
        numbers = values[~np.isnan(values)]
        assert (numbers[1:] <= numbers[:-1]).all()
        assert np.isnan(values[len(numbers) :]).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int64])
def test_a_few_of_many_classes_are_found_as_if_all_were_sorted(dtype: type[np.number[Any]]) -> None:
    scores = np.random.default_rng(0).integers(0, 50, (3, 2 * MANY)).astype(dtype)  # so that many are equal
    if dtype is np.float32:
        scores[0, ::2] = scores[1] = np.nan
        scores[1, 7:9] = 1
    few = classify(scores, 5, (), batched=True)
    sorted_all = [np.argsort(-row.astype(np.float64), kind="stable")[:5].tolist() for row in scores]
    assert [[int(text.split(b":")[1]) for text in row] for row in few] == sorted_all


def test_no_more_classes_are_named_than_an_answer_takes() -> None:
    scores = np.zeros((2, MAX_NAMED), np.float16)
    assert classify(scores, MAX_NAMED // 2, (), batched=True).shape == (2, MAX_NAMED // 2)
    with pytest.raises(InvalidArgumentError, match="131072 classes are asked for, expected at most 65536; ask for fewer"):
        classify(scores, 2**40, (), batched=True)
