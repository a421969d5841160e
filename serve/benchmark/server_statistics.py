"""The server's own counters around a load: how large its batches were, and how long requests waited and were computed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from protos.inference_pb2 import ModelStatistics

NANOSECONDS_PER_MS = 1e6


@dataclass(frozen=True, kw_only=True)
class ServerTotals:
    """Counters since the model was loaded, or between two moments when one is taken from another.

    Attributes:
        requests: answered with success.
        rows: rows computed (`inference_count`).
        executions: batches computed.
        queued: requests whose waiting time is in queue_ns.
        queue_ns: nanoseconds that they waited in all.
        computed: requests whose computing time is in compute_ns.
        compute_ns: nanoseconds for assembling the batch, running the model and taking the batch apart.
    """

    requests: int = 0
    rows: int = 0
    executions: int = 0
    queued: int = 0
    queue_ns: int = 0
    computed: int = 0
    compute_ns: int = 0

    @classmethod
    def of(cls, statistics: Iterable[ModelStatistics]) -> ServerTotals:
        """The sum over a model's versions."""
        total = cls()
        for model in statistics:
            times = model.inference_stats
            total += cls(
                requests=times.success.count,
                rows=model.inference_count,
                executions=model.execution_count,
                queued=times.queue.count,
                queue_ns=times.queue.ns,
                computed=times.compute_infer.count,
                compute_ns=times.compute_input.ns + times.compute_infer.ns + times.compute_output.ns,
            )
        return total

    def __add__(self, other: ServerTotals) -> ServerTotals:
        return ServerTotals(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def __sub__(self, other: ServerTotals) -> ServerTotals:
        return ServerTotals(**{name: value - getattr(other, name) for name, value in vars(self).items()})

    @property
    def mean_batch_size(self) -> float | None:
        """Rows per batch; None when nothing was computed."""
        return self.rows / self.executions if self.executions else None

    @property
    def queue_ms(self) -> float | None:
        """Mean milliseconds that a request waited; None when none did."""
        return self.queue_ns / self.queued / NANOSECONDS_PER_MS if self.queued else None

    @property
    def compute_ms(self) -> float | None:
        """Mean milliseconds that a request's batch took; None when nothing was computed."""
        return self.compute_ns / self.computed / NANOSECONDS_PER_MS if self.computed else None
