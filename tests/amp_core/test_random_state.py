"""Random generators: kept, restored, and isolated from the process's own."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from halfserve.amp_core.random_state import (
    IsolatedRandom,
    Purpose,
    preserved_random_state,
    random_state,
    seed_everything,
    seed_words,
    set_random_state,
)
from tests.amp_core.data.sets import noise

CPU = torch.device("cpu")


def draw() -> tuple[float, ...]:
    shared = np.random.rand(), np.random.randn()  # noqa: NPY002  (the generator that models share)
    return (torch.rand(()).item(), random.random(), random.gauss(), *map(float, shared))  # noqa: S311  (no secret)


@given(seed=st.integers(0, 2**63 - 1), before=st.integers(0, 5))
def test_all_generators_go_on_where_they_were(seed: int, before: int) -> None:
    with preserved_random_state(CPU):
        seed_everything(seed)
        for _ in range(before):
            draw()
        state = random_state(CPU)
        expected = [draw() for _ in range(3)]
        seed_everything(0)
        set_random_state(state, CPU)
        assert [draw() for _ in range(3)] == expected


def test_states_are_plain_enough_for_a_checkpoint(tmp_path: Path) -> None:
    with preserved_random_state(CPU):
        draw()
        torch.save(random_state(CPU), tmp_path / "states.pt")
        expected = draw()
        set_random_state(torch.load(tmp_path / "states.pt", weights_only=True), CPU)
        assert draw() == expected


def test_different_seeds_differ_in_every_generator() -> None:
    with preserved_random_state(CPU):
        drawn = []
        for seed in (1, 2, 3):
            seed_everything(seed)
            drawn.append(draw())
        assert all(len(set(column)) == 3 for column in zip(*drawn, strict=True))


def test_what_is_kept_is_kept() -> None:
    seed_everything(3)
    expected = draw()
    seed_everything(3)
    with preserved_random_state(CPU):
        draw()
    assert draw() == expected


WORDS = st.integers(0, 2**64 - 1)


def test_the_process_draws_as_if_nothing_had_been_drawn() -> None:
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002  (the shared generator is the subject)
    random.seed(1)
    np.random.standard_normal()  # noqa: NPY002  (leaves a second value waiting, which must survive too)
    twin = IsolatedRandom(Purpose.BATCH, 5)
    states = torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate()  # noqa: NPY002  (as above)
    with pytest.raises(ZeroDivisionError), twin:
        _ = noise() / (1 // 0)
    assert torch.equal(torch.get_rng_state(), states[0])
    after = np.random.get_state(legacy=False)  # noqa: NPY002  (as above)
    np.testing.assert_equal(after, states[1])
    assert random.getstate() == states[2]


def test_it_starts_from_the_seed_each_time_or_goes_on() -> None:
    again, on = IsolatedRandom(Purpose.BATCH, 5), IsolatedRandom(Purpose.BATCH, 5, goes_on=True)
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
@example(one=(2**32, 0), other=(0, 1))  # a large number is not taken for two small ones
@given(one=st.tuples(WORDS, WORDS), other=st.tuples(WORDS, WORDS))
def test_seeds_differ_whenever_a_number_does(one: tuple[int, int], other: tuple[int, int]) -> None:
    assert (seed_words(Purpose.BATCH, *one) == seed_words(Purpose.BATCH, *other)) is (one == other)
    assert seed_words(Purpose.BATCH, *one) != seed_words(Purpose.STREAM, *one)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_draws_on_as_before() -> None:
    before = torch.cuda.get_rng_state()
    with IsolatedRandom(Purpose.BATCH, 5):
        noise()
    assert torch.equal(torch.cuda.get_rng_state(), before)
