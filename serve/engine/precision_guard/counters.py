"""What the guard has seen of one model, as its readers get it: metrics and the page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftHistogram:
    """Scaled errors of shadow runs, one entry per request that was compared (see `drift.compare`).

    Attributes:
        bounds: upper bounds of the buckets, rising; the last bucket, without one, holds what is beyond or not finite.
        counts: per bucket, not cumulative; one more than bounds.
        total: the sum of the errors that are finite.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputCounters:
    """One output of a model.

    Attributes:
        non_finite_values: NaN and infinities in answers to requests whose inputs were finite.
        non_finite_requests: such requests.
        from_inputs: requests that got such values and whose own inputs held some.
        drift: of shadow runs; None before the first.
        rows_compared: rows of shadow runs that choose between classes (or elements, where they are no floating numbers).
        rows_agreeing: those of them that choose as the fp32 twin does (equal elements).
    """

    non_finite_values: int = 0
    non_finite_requests: int = 0
    from_inputs: int = 0
    drift: DriftHistogram | None = None
    rows_compared: int = 0
    rows_agreeing: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardCounters:
    """Totals since the model was loaded.

    Attributes:
        policy: what happens to a request with values that are not finite: "count", "reject" or "fallback".
        outputs: by the output's name; every output is there.
        rejected: requests that failed for such values.
        fallbacks: requests that were answered from the fp32 twin.
        shadow_runs: requests that were run on the twin as well, to compare.
        shadow_dropped: requests chosen for that and dropped, since the shadow was busy or had had its share of time.
        shadow_failed: shadow runs that ended in an error.
        degraded: the drift is over its threshold (see `degradation`).
        drift_threshold: the scaled error that is allowed; None where there is no twin to compare with.
    """

    policy: str
    outputs: Mapping[str, OutputCounters]
    rejected: int = 0
    fallbacks: int = 0
    shadow_runs: int = 0
    shadow_dropped: int = 0
    shadow_failed: int = 0
    degraded: bool = False
    drift_threshold: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardEvent:
    """Something that a person may want to know of.

    Attributes:
        time: seconds since the epoch.
        model: "name/version".
        kind: "non_finite", "rejected", "fallback", "degraded", "recovered" or "shadow".
        text: one line.
    """

    time: float
    model: str
    kind: str
    text: str
