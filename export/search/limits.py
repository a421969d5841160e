"""When a search ends although a smaller set may be found."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from export.errors import UsageError

MAX_RUNS = 120
FEWEST_RUNS = 2  # one with all nodes in float16, one with none

Ending: TypeAlias = Literal["complete", "max_runs", "max_minutes", "interrupted"]


@dataclass(frozen=True, kw_only=True)
class SearchLimits:
    """Limits of a search. The first two runs are made whatever the limits: without them there is nothing to return.

    Attributes:
        max_runs: How many sets may be tried at most; at least 2.
        max_minutes: After how many minutes no further set is tried; None for no limit. A run that has begun is finished.

    Raises:
        UsageError: A limit is out of range.
    """

    max_runs: int = MAX_RUNS
    max_minutes: float | None = None

    def __post_init__(self) -> None:
        if self.max_runs < FEWEST_RUNS:
            raise UsageError(
                f"max_runs is {self.max_runs}; expected at least {FEWEST_RUNS}: one with all nodes in float16, one with none"
            )
        if self.max_minutes is not None and not (self.max_minutes > 0 and math.isfinite(self.max_minutes)):
            raise UsageError(f"max_minutes is {self.max_minutes}; expected a number above 0")


@dataclass
class Usage:
    """What a search has used of its limits, from the moment it is made.

    Attributes:
        limits: The limits.
        runs: How many sets were tried.
    """

    limits: SearchLimits
    runs: int = 0
    _began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Time since the search began."""
        return time.monotonic() - self._began

    @property
    def reached(self) -> Literal["max_runs", "max_minutes"] | None:
        """The limit that forbids another run; None where one may be made."""
        if self.runs < FEWEST_RUNS:
            return None
        if self.runs >= self.limits.max_runs:
            return "max_runs"
        minutes = self.limits.max_minutes
        return "max_minutes" if minutes is not None and self.seconds >= 60 * minutes else None
