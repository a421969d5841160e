"""Random numbers of the data's own: reproducible from (seed, epoch, batch), and invisible to the rest of the process."""

from __future__ import annotations

import random
from enum import IntEnum
from types import TracebackType
from typing import Any

import numpy as np
import torch


class Purpose(IntEnum):
    """What random numbers are for; different purposes never share a seed."""

    ORDER = 0
    BATCH = 1
    STREAM = 2


def seed_words(purpose: Purpose, *numbers: int) -> list[int]:
    """Eight 32-bit words that depend on every number given (each from 0 to 2**64 - 1).

    Source of the mixing: numpy's SeedSequence, after M. E. O'Neill, "Developing a seed_seq alternative", 2015.
    """
    # Two words for each number, whatever its size: (2**32, 0) and (0, 1) must not look alike.
    entropy = np.array([purpose, *numbers], dtype=np.uint64).view(np.uint32)
    return [int(word) for word in np.random.SeedSequence(entropy).generate_state(8)]


def generator(purpose: Purpose, *numbers: int) -> torch.Generator:
    """A CPU generator seeded by `seed_words`."""
    high, low, *_ = seed_words(purpose, *numbers)
    return torch.Generator().manual_seed((high << 32 | low) % 2**63)


class OwnRandom:
    """A state of the process's random number generators that holds inside `with` alone.

    Data sets draw from the generators everybody shares: torch's on the CPU, numpy's and Python's. Inside `with` those start
    from a seed; afterwards they are as if nothing had been drawn (80 microseconds, most of it numpy's). CUDA's generators are
    left alone: items are made on the CPU.

    Args:
        purpose: What the numbers are for.
        *numbers: What the seed depends on, such as the seed of the run, the epoch and the batch; each from 0 to 2**64 - 1.
        goes_on: Whether a further `with` continues where the last one stopped, instead of from the seed.
    """

    def __init__(self, purpose: Purpose, *numbers: int, goes_on: bool = False) -> None:
        self._words = seed_words(purpose, *numbers)
        self._goes_on = goes_on
        self._inside: _States | None = None
        self._outside: _States | None = None

    def __enter__(self) -> None:
        self._outside = _states()
        if self._inside is None:
            _seed_all(self._words)
        else:
            _set(self._inside)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._outside is not None  # noqa: S101  (for the type checker: only `with` calls this, after __enter__)
        if self._goes_on:
            self._inside = _states()
        _set(self._outside)


_States = tuple[torch.Tensor, dict[str, Any], tuple[Any, ...]]


def _states() -> _States:
    return torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate()  # noqa: NPY002  (what data sets draw from)


def _set(states: _States) -> None:
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])  # noqa: NPY002  (what data sets draw from)
    random.setstate(states[2])


def _seed_all(words: list[int]) -> None:
    # Not torch.manual_seed, which would reseed the CUDA generators, and dropout with them.
    torch.default_generator.manual_seed(words[0] << 31 ^ words[1])
    # Other words for Python: it and numpy use the same algorithm, and would give the same numbers.
    np.random.seed(words[:4])  # noqa: NPY002  (what data sets draw from)
    random.seed(sum(word << 32 * place for place, word in enumerate(words[4:])))
