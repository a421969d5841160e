"""How many messages of each kind got what they must get."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

LISTED = 3  # complaints of each kind


@dataclass
class Counts:
    """So far.

    Attributes:
        right: by kind.
        wrong: by kind.
        statuses: that calls ended with: gRPC's number, or HTTP's where there was none.
        complaints: in words, the first few of each kind.
    """

    right: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    complaints: list[str] = field(default_factory=list)
    _listed: Counter[str] = field(default_factory=Counter)

    def take(self, kind: str, complaint: str, messages: int = 1) -> None:
        """Count what came of messages of one kind."""
        if not complaint:
            self.right[kind] += messages
            return
        self.wrong[kind] += messages
        self._listed[kind] += 1
        if self._listed[kind] <= LISTED:
            self.complaints.append(f"{kind}: {complaint}")

    @property
    def total(self) -> int:
        """All messages."""
        return self.right.total() + self.wrong.total()

    def by_kind(self) -> dict[str, list[int]]:
        """[right, wrong] of each kind."""
        return {kind: [self.right[kind], self.wrong[kind]] for kind in sorted(self.right.keys() | self.wrong.keys())}
