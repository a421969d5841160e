from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from amp_core.training.random_state import kept_random_state, random_state, seed_everything, set_random_state

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")


def draw() -> tuple[float, ...]:
    shared = np.random.rand(), np.random.randn()  # noqa: NPY002  (the generator that models share)
    return (torch.rand(()).item(), random.random(), random.gauss(), *map(float, shared))  # noqa: S311  (no secret)


@given(seed=st.integers(0, 2**63 - 1), before=st.integers(0, 5))
def test_all_generators_go_on_where_they_were(seed: int, before: int) -> None:
    with kept_random_state(CPU):
        seed_everything(seed)
        for _ in range(before):
            draw()
        state = random_state(CPU)
        expected = [draw() for _ in range(3)]
        seed_everything(0)
        set_random_state(state, CPU)
        assert [draw() for _ in range(3)] == expected


def test_states_are_plain_enough_for_a_checkpoint(tmp_path: Path) -> None:
    with kept_random_state(CPU):
        draw()
        torch.save(random_state(CPU), tmp_path / "states.pt")
        expected = draw()
        set_random_state(torch.load(tmp_path / "states.pt", weights_only=True), CPU)
        assert draw() == expected


def test_different_seeds_differ_in_every_generator() -> None:
    with kept_random_state(CPU):
        drawn = []
        for seed in (1, 2, 3):
            seed_everything(seed)
            drawn.append(draw())
        assert all(len(set(column)) == 3 for column in zip(*drawn, strict=True))


def test_what_is_kept_is_kept() -> None:
    seed_everything(3)
    expected = draw()
    seed_everything(3)
    with kept_random_state(CPU):
        draw()
    assert draw() == expected
