"""Random numbers that nobody else notices."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_core.data.own_random import OwnRandom, Purpose, seed_words
from tests.amp_core.data.sets import noise

WORDS = st.integers(0, 2**64 - 1)


def test_the_process_draws_as_if_nothing_had_been_drawn() -> None:
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002  (the shared generator is the subject)
    random.seed(1)
    np.random.standard_normal()  # noqa: NPY002  (leaves a second value waiting, which must survive too)
    twin = OwnRandom(Purpose.BATCH, 5)
    states = torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate()  # noqa: NPY002  (as above)
    with pytest.raises(ZeroDivisionError), twin:
        _ = noise() / (1 // 0)
    assert torch.equal(torch.get_rng_state(), states[0])
    after = np.random.get_state(legacy=False)  # noqa: NPY002  (as above)
    np.testing.assert_equal(after, states[1])
    assert random.getstate() == states[2]


def test_it_starts_from_the_seed_each_time_or_goes_on() -> None:
    again, on = OwnRandom(Purpose.BATCH, 5), OwnRandom(Purpose.BATCH, 5, goes_on=True)
    with again:
        first, second = noise(), noise()
    with again:
        assert torch.equal(noise(), first)
    with on:
        assert torch.equal(noise(), first)
    noise()
    with on:
        assert torch.equal(noise(), second)


@settings(deadline=None, max_examples=50)
@given(one=st.tuples(WORDS, WORDS), other=st.tuples(WORDS, WORDS))
def test_seeds_differ_whenever_a_number_does(one: tuple[int, int], other: tuple[int, int]) -> None:
    assert (seed_words(Purpose.BATCH, *one) == seed_words(Purpose.BATCH, *other)) is (one == other)
    assert seed_words(Purpose.BATCH, *one) != seed_words(Purpose.STREAM, *one)


def test_large_numbers_do_not_look_like_two_small_ones() -> None:
    assert seed_words(Purpose.BATCH, 2**32, 0) != seed_words(Purpose.BATCH, 0, 1)


def test_the_generators_give_different_numbers() -> None:
    with OwnRandom(Purpose.BATCH, 5):
        assert len(set(noise().tolist())) == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_draws_on_as_before() -> None:
    before = torch.cuda.get_rng_state()
    with OwnRandom(Purpose.BATCH, 5):
        noise()
    assert torch.equal(torch.cuda.get_rng_state(), before)
