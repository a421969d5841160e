"""Reproducible random choices."""

from __future__ import annotations

import random


def seeded(seed: int) -> random.Random:
    """A generator that makes the same choices for the same seed."""
    return random.Random(seed)  # noqa: S311  (what is tested with need not be hard to guess)
