"""The server's own counters around a load: how large its batches were, and where a request's time went."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from protos.inference_pb2 import ModelStatistics

NANOSECONDS_PER_MS = 1e6


@dataclass(frozen=True, kw_only=True)
class ServerTotals:
    """Counters since the model was loaded, or between two moments.

    Attributes:
        requests: answered with success.
        failed: answered with an error.
        rows: rows computed (`inference_count`).
        executions: batches computed.
        queued: requests whose waiting time is in queue_ns.
        queue_ns: nanoseconds that they waited in all.
        computed: requests whose computing times are in the next three.
        compute_input_ns: nanoseconds for assembling their batches.
        compute_infer_ns: nanoseconds for running the model.
        compute_output_ns: nanoseconds for taking the batches apart.
    """

    requests: int = 0
    failed: int = 0
    rows: int = 0
    executions: int = 0
    queued: int = 0
    queue_ns: int = 0
    computed: int = 0
    compute_input_ns: int = 0
    compute_infer_ns: int = 0
    compute_output_ns: int = 0

    @classmethod
    def of(cls, statistics: Iterable[ModelStatistics]) -> ServerTotals:
        """The sum over models and versions."""
        total = cls()
        for model in statistics:
            times = model.inference_stats
            total += cls(
                requests=times.success.count,
                failed=times.fail.count,
                rows=model.inference_count,
                executions=model.execution_count,
                queued=times.queue.count,
                queue_ns=times.queue.ns,
                computed=times.compute_infer.count,
                compute_input_ns=times.compute_input.ns,
                compute_infer_ns=times.compute_infer.ns,
                compute_output_ns=times.compute_output.ns,
            )
        return total

    def __add__(self, other: ServerTotals) -> ServerTotals:
        return ServerTotals(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def since(self, before: ServerTotals) -> ServerTotals | None:
        """What was counted since an earlier moment; None where the counters have started anew in between."""
        counts = {name: value - getattr(before, name) for name, value in vars(self).items()}
        return None if min(counts.values()) < 0 else ServerTotals(**counts)

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
        """Mean milliseconds that a request's batch took in all; None when nothing was computed."""
        return self._mean_ms(self.compute_input_ns + self.compute_infer_ns + self.compute_output_ns)

    @property
    def split_ms(self) -> dict[str, float | None]:
        """Mean milliseconds per request, stage by stage in the order they come."""
        return {
            "queue": self.queue_ms,
            "compute_input": self._mean_ms(self.compute_input_ns),
            "compute_infer": self._mean_ms(self.compute_infer_ns),
            "compute_output": self._mean_ms(self.compute_output_ns),
        }

    def _mean_ms(self, nanoseconds: int) -> float | None:
        return nanoseconds / self.computed / NANOSECONDS_PER_MS if self.computed else None
