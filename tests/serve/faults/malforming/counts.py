"""Counts of messages with right and wrong answers, by kind."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

LISTED = 3  # complaints that are kept for each kind


@dataclass
class Counts:
    """Counts so far."""

    right: Counter[str] = field(default_factory=Counter)  # messages with the right answer, by kind
    wrong: Counter[str] = field(default_factory=Counter)  # messages with a wrong answer, by kind
    statuses: Counter[str] = field(default_factory=Counter)  # calls by final status: gRPC's number, or HTTP's if there was none
    complaints: list[str] = field(default_factory=list)  # descriptions of the first few faults of each kind
    _listed: Counter[str] = field(default_factory=Counter)

    def take(self, kind: str, complaint: str, messages: int = 1) -> None:
        """Count the result of messages of one kind."""
        if not complaint:
            self.right[kind] += messages
            return
        self.wrong[kind] += messages
        self._listed[kind] += 1
        if self._listed[kind] <= LISTED:
            self.complaints.append(f"{kind}: {complaint}")

    @property
    def total(self) -> int:
        """Number of all messages."""
        return self.right.total() + self.wrong.total()

    def by_kind(self) -> dict[str, list[int]]:
        """[right, wrong] of each kind."""
        return {kind: [self.right[kind], self.wrong[kind]] for kind in sorted(self.right.keys() | self.wrong.keys())}
