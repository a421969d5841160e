"""What models have done between two looks at their statistics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from protos.inference_pb2 import ModelStatistics

Key = tuple[str, str]  # model, version
NS_PER_MS = 1e6


@dataclass(frozen=True, kw_only=True)
class Look:
    """The statistics at one time.

    Attributes:
        models: by name and version.
        at_s: on the monotonic clock.
    """

    models: Mapping[Key, ModelStatistics]
    at_s: float


def looked_at(statistics: Iterable[ModelStatistics], names: Sequence[str], at_s: float) -> Look:
    """A look at the models of these names; at all, if none is named."""
    return Look(models={(s.name, s.version): s for s in statistics if not names or s.name in names}, at_s=at_s)


def looks_json(before: Look, now: Look) -> dict[str, Any]:
    """{"seconds", "models": [{"name", "version", "requests_per_s", "rows_per_s", "failures_per_s", "mean_batch", ...}]}."""
    seconds = max(now.at_s - before.at_s, 1e-9)
    rows = [_row(before.models.get(key), model, seconds) for key, model in sorted(now.models.items())]
    return {"seconds": round(seconds, 3), "models": rows}


def looks_table(before: Look, now: Look) -> Table:
    """One line per model version; times are means of the requests in between."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("model", no_wrap=True)
    for heading in ("version", "req/s", "rows/s", "fail/s", "batch", "queue ms", "compute ms"):
        table.add_column(heading, justify="right")
    for row in looks_json(before, now)["models"]:
        rates = (f"{row[key]:,.0f}" for key in ("requests_per_s", "rows_per_s", "failures_per_s"))
        means = ("-" if row[key] is None else f"{row[key]:.2f}" for key in ("mean_batch", "queue_ms", "compute_ms"))
        table.add_row(row["name"], row["version"], *rates, *means)
    return table


def _row(before: ModelStatistics | None, now: ModelStatistics, seconds: float) -> dict[str, Any]:
    # A model that was loaded anew in between counts from nothing.
    if before is None or before.inference_count > now.inference_count:
        before = ModelStatistics()
    past, present = before.inference_stats, now.inference_stats
    requests = present.success.count - past.success.count
    rows, batches = now.inference_count - before.inference_count, now.execution_count - before.execution_count
    compute_ns = sum(
        getattr(present, stage).ns - getattr(past, stage).ns for stage in ("compute_input", "compute_infer", "compute_output")
    )
    return {
        "name": now.name,
        "version": now.version,
        "requests_per_s": round(requests / seconds, 1),
        "rows_per_s": round(rows / seconds, 1),
        "failures_per_s": round((present.fail.count - past.fail.count) / seconds, 1),
        "mean_batch": _mean(rows, batches),
        "queue_ms": _mean((present.queue.ns - past.queue.ns) / NS_PER_MS, requests),
        "compute_ms": _mean(compute_ns / NS_PER_MS, requests),
    }


def _mean(total: float, count: int) -> float | None:
    return round(total / count, 3) if count else None
