"""The random generators that a model may draw from: torch's, Python's and numpy's, all at once."""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


def random_state(device: torch.device) -> dict[str, Any]:
    """Read the states, as plain values that a checkpoint can hold.

    Args:
        device: Where the model runs; a CUDA device has a generator of its own.

    Returns:
        `cpu`, `python`, `numpy` and perhaps `cuda`: tensors, and dicts of tensors and numbers.
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
    """Go on from states that `random_state` returned; those that are missing stay as they are."""
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
def kept_random_state(device: torch.device) -> Iterator[None]:
    """Leave all generators as they were, whatever is drawn inside."""
    before = random_state(device)
    try:
        yield
    finally:
        set_random_state(before, device)
