"""What is remembered of numbers: how large they were, and how many of them float16 cannot hold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

COUNTS = ("elements", "non_finite", "zeros", "overflow", "underflow", "subnormal")


@dataclass(frozen=True, kw_only=True)
class Magnitudes:
    """The absolute values of tensors, summed up. Each element is counted in at most one of the five kinds.

    Attributes:
        elements: How many numbers were looked at; a complex number is two.
        non_finite: How many were infinite or NaN.
        zeros: How many were zero.
        overflow: How many were finite and above float16's largest number, 65504.
        underflow: How many were not zero but below float16's smallest number, 2**-24.
        subnormal: How many were from 2**-24 up to 2**-14, where float16 loses digits.
        largest: The largest finite magnitude; None if none was finite and not zero.
        smallest: The smallest finite magnitude above zero; None if there was none.
    """

    elements: int = 0
    non_finite: int = 0
    zeros: int = 0
    overflow: int = 0
    underflow: int = 0
    subnormal: int = 0
    largest: float | None = None
    smallest: float | None = None

    def share(self, count: int) -> float:
        """What part of all elements a count is, from 0 to 1."""
        return count / self.elements if self.elements else 0.0

    @property
    def lost_above(self) -> float:
        """Share of the elements that are infinite or NaN, or would be in float16."""
        return self.share(self.non_finite + self.overflow)

    @property
    def lost_below(self) -> float:
        """Share of the elements that are not zero and below float16's smallest number."""
        return self.share(self.underflow)

    @classmethod
    def of_all(cls, parts: Iterable[Magnitudes]) -> Magnitudes:
        """The magnitudes of several groups of numbers taken as one."""
        parts = tuple(parts)
        counts = {name: sum(getattr(part, name) for part in parts) for name in COUNTS}
        return cls(
            **counts,
            largest=max((part.largest for part in parts if part.largest is not None), default=None),
            smallest=min((part.smallest for part in parts if part.smallest is not None), default=None),
        )
