"""The random generators that models and data sets share: torch's, Python's and numpy's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from types import TracebackType
from typing import Any

import numpy as np
import torch


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states as plain values for a checkpoint, by name: `cpu`, `python`, `numpy`, and `cuda` for a model on
    such a device.
    """
    version, words, gauss = random.getstate()
    _, key, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002  (the generator that models share)
    states: dict[str, Any] = {
        "cpu": torch.get_rng_state(),
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "key": torch.from_numpy(np.asarray(key).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(cached),
        },
    }
    return states | {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else states


def set_random_state(states: dict[str, Any], device: torch.device) -> None:
    """Restore states from `random_state`; missing generators stay unchanged."""
    torch.set_rng_state(states["cpu"])
    if "python" in states:
        python = states["python"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    if "numpy" in states:
        values = states["numpy"]
        key = values["key"].numpy().astype(np.uint32)
        legacy = ("MT19937", key, values["position"], values["has_gauss"], values["gauss"])
        np.random.set_state(legacy)  # noqa: NPY002  (the generator that models share)
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def seed_everything(seed: int) -> None:
    """Seed all generators; `seed` is from 0 to 2**63 - 1."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])  # noqa: NPY002  (the generator that models share)


@contextmanager
def preserved_random_state(device: torch.device) -> Iterator[None]:
    """Restore all generators afterwards."""
    before = random_state(device)
    try:
        yield
    finally:
        set_random_state(before, device)


class Purpose(IntEnum):
    """The purpose of random numbers; different purposes never share a seed."""

    ORDER = 0
    BATCH = 1
    STREAM = 2


def seed_words(purpose: Purpose, *numbers: int) -> list[int]:
    """Eight 32-bit words that depend on every number given (each from 0 to 2**64 - 1).

    Source of the mixing: numpy's SeedSequence, after M. E. O'Neill, "Developing a seed_seq alternative", 2015.
    """
    # Two words for each number, so that (2**32, 0) and (0, 1) give different seeds.
    entropy = np.array([purpose, *numbers], dtype=np.uint64).view(np.uint32)
    return [int(word) for word in np.random.SeedSequence(entropy).generate_state(8)]


def generator(purpose: Purpose, *numbers: int) -> torch.Generator:
    """Return a CPU generator seeded by `seed_words`."""
    high, low, *_ = seed_words(purpose, *numbers)
    return torch.Generator().manual_seed((high << 32 | low) % 2**63)


class IsolatedRandom:
    """A state of the process's random generators that holds only inside `with`.

    Data sets draw from the shared generators: torch's on the CPU, numpy's and Python's. Inside `with` these start from a seed,
    which depends on the purpose and on all numbers (each from 0 to 2**64 - 1); the state before is restored afterwards (80
    microseconds, mostly numpy's). With `goes_on` a further `with` continues from the last state instead of the seed. CUDA's
    generators stay unchanged: items are made on the CPU.
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
            _set_states(self._inside)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._outside is not None  # noqa: S101  (for the type checker: only `with` calls this, after __enter__)
        if self._goes_on:
            self._inside = _states()
        _set_states(self._outside)


_States = tuple[torch.Tensor, dict[str, Any], tuple[Any, ...]]


def _states() -> _States:
    return torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate()  # noqa: NPY002  (what data sets draw from)


def _set_states(states: _States) -> None:
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])  # noqa: NPY002  (what data sets draw from)
    random.setstate(states[2])


def _seed_all(words: list[int]) -> None:
    # Not torch.manual_seed, which would reseed the CUDA generators, and dropout with them.
    torch.default_generator.manual_seed(words[0] << 31 ^ words[1])
    # Different words for Python: it and numpy use the same algorithm, and would draw the same numbers.
    np.random.seed(words[:4])  # noqa: NPY002  (what data sets draw from)
    random.seed(sum(word << 32 * place for place, word in enumerate(words[4:])))
