"""How large a model's batches may become, and how long requests may wait for one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """The bounds of one model's queue.

    Attributes:
        max_rows: rows in one batch, at least 1.
        max_delay_s: seconds that the first request of a batch waits for others; 0 sends what is there.
        preferred_rows: a bucket that holds one of these sizes need not wait any longer.
        max_waiting: requests in the queue, over all buckets.
        max_waiting_bytes: that these hold; one that is alone may hold more.
        levels: priorities that requests may have.
        max_waiting_by_level: the same bound for one priority alone, where it has one.
        padded_rows: a batch is filled up to the next of these sizes; none leaves batches as they are.
        latency_target_s: seconds within which requests are to be answered; what cannot be is refused. None: no such target.
        compute_weight: the model's part of the compute slots, against other models' (see `compute_slots`).
    """

    max_rows: int
    max_delay_s: float = 0.0
    preferred_rows: tuple[int, ...] = ()
    max_waiting: int = 8192
    max_waiting_bytes: int = 2**30
    levels: int = 1
    max_waiting_by_level: Mapping[int, int] = field(default_factory=dict)
    padded_rows: tuple[int, ...] = ()
    latency_target_s: float | None = None
    compute_weight: float = 1.0

    @property
    def targets(self) -> tuple[int, ...]:
        """Sizes at which waiting ends, largest first."""
        return tuple(sorted({self.max_rows, *(p for p in self.preferred_rows if 0 < p <= self.max_rows)}, reverse=True))
