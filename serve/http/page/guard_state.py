"""What the precision guard has seen, as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from serve.engine.model import Model

EVENTS = 50


def guard_state(model: Model) -> dict[str, Any] | None:
    """The guard's counters of one model version; None where it has no guard."""
    if model.guard is None:
        return None
    counters = model.guard.counters()
    outputs = counters.outputs.values()
    drift = [output.drift for output in outputs if output.drift is not None]
    rows = sum(output.rows_compared for output in outputs)
    return {
        "policy": counters.policy,
        "degraded": counters.degraded,
        "non_finite_requests": sum(output.non_finite_requests for output in outputs),
        "from_inputs": sum(output.from_inputs for output in outputs),
        "rejected": counters.rejected,
        "fallbacks": counters.fallbacks,
        "shadow_runs": counters.shadow_runs,
        "threshold": _finite(counters.drift_threshold),
        "agreement": sum(output.rows_agreeing for output in outputs) / rows if rows else None,
        "drift": [{"bounds": [_finite(bound) for bound in entry.bounds], "counts": list(entry.counts)} for entry in drift],
    }


def guard_events(models: Iterable[Model]) -> list[dict[str, Any]]:
    """The latest events of all models, newest first."""
    events = [event for model in models if model.guard is not None for event in model.guard.recent_events()]
    events.sort(key=lambda event: event.time, reverse=True)
    return [{"time_s": e.time, "model": e.model, "kind": str(e.kind), "text": e.text} for e in events[:EVENTS]]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
