"""How long the soaks and fuzzing of the long lane run: TEST_SCALE=30 makes them 30 times as long as in CI."""

from __future__ import annotations

import os

SCALE = float(os.environ.get("TEST_SCALE", "1"))


def scaled(number: int) -> int:
    """A number of requests, messages or seconds of CI, times SCALE."""
    return round(number * SCALE)
