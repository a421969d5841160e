"""Counts the guard's findings: non-finite values, and the drift of shadow runs from the fp32 twin."""

from __future__ import annotations

import logging
import math
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from halfserve.serve.engine.tensors import Array

logger = logging.getLogger(__name__)


# Number of runs in the window, and the fewest runs for a decision.
WINDOW = 200
LEAST_RUNS = 20
# Samples at the edge of the training data may be over the threshold now and then; one in twenty is no accident. Recovery takes
# far fewer, so that a share near the limit does not change the state with every run.
DEGRADED_SHARE = 0.05
RECOVERED_SHARE = 0.01
# Buckets of scaled errors: float16 rounds to 5e-4 of a number's size, and an error of 1 is as large as the output.
BOUNDS = (1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0)
# float16's smallest normal number: errors of smaller outputs are taken relative to it.
LEAST_SCALE = 2.0**-14
# Factor by which a reference's size decays with each further run: half after 69.
SCALE_MEMORY = 0.99
KEPT_EVENTS = 100
# Seconds between two lines, which bounds the log of a model whose every answer is bad.
LOG_EVERY_S = 60.0


class Degradation:
    """Decides from the scaled errors of shadow runs whether a model is degraded.

    Attributes:
        threshold: the allowed scaled error.
        degraded: whether more than DEGRADED_SHARE of the window was over it, and more than RECOVERED_SHARE has been since.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.degraded = False
        self._over: deque[bool] = deque(maxlen=WINDOW)

    @property
    def share(self) -> float:
        """Share of runs in the window over the threshold; 0 without runs."""
        return sum(self._over) / len(self._over) if self._over else 0.0

    def add(self, scaled_error: float) -> bool:
        """Record a run; returns whether it changed `degraded`."""
        self._over.append(not scaled_error <= self.threshold)
        if len(self._over) < LEAST_RUNS:
            return False
        before, share = self.degraded, self.share
        self.degraded = share > (RECOVERED_SHARE if before else DEGRADED_SHARE)
        return self.degraded is not before


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftHistogram:
    """Scaled errors of shadow runs, one entry per compared request (see `compare`).

    Attributes:
        bounds: upper bounds of the buckets, rising; the last bucket, without one, holds larger and non-finite errors.
        counts: number of errors per bucket, not cumulative; one more than bounds.
        total: sum of the finite errors.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


@dataclass(kw_only=True, slots=True)
class OutputCounters:
    """Counts of one output of a model.

    Attributes:
        non_finite_values: number of NaN and infinities in answers to requests with finite inputs.
        non_finite_requests: number of requests that got such values.
        from_inputs: number of requests that got non-finite values and whose own inputs held some.
        drift: scaled errors of shadow runs; None before the first.
        rows_compared: number of rows in shadow runs that choose between classes (elements, for non-floating outputs).
        rows_agreeing: number of rows that choose the fp32 twin's class (equal elements).
    """

    non_finite_values: int = 0
    non_finite_requests: int = 0
    from_inputs: int = 0
    drift: DriftHistogram | None = None
    rows_compared: int = 0
    rows_agreeing: int = 0


@dataclass(kw_only=True, slots=True)
class GuardCounters:
    """Totals since the model was loaded.

    Attributes:
        policy: treatment of requests with non-finite outputs: "count", "reject" or "fallback".
        outputs: counts of every output, by the output's name.
        rejected: number of requests that failed for such values.
        fallbacks: number of requests that were answered from the fp32 twin.
        shadow_runs: number of requests that were also run on the twin, to compare.
        shadow_dropped: number of sampled requests that were not run, because the shadow was busy or had used its share of time.
        shadow_failed: number of shadow runs that ended in an error.
        degraded: whether the drift is over its threshold (see `Degradation`).
        drift_threshold: the allowed scaled error; None without a twin to compare with.
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
    """An event for operators.

    Attributes:
        time: time of the event, in seconds since the epoch.
        model: "name/version".
        kind: "non_finite", "rejected", "fallback", "degraded", "recovered" or "shadow".
        text: description in one line.
    """

    time: float
    model: str
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Distance:
    """The distance of one answer from the reference.

    Attributes:
        error: the largest |answer - reference| where both are finite; infinite if only one of them is, or if both are infinite
            with different signs.
        scale: the largest finite |reference|; 0 if there is none.
        rows: number of rows that choose between classes; number of elements, for non-floating arrays.
        agreeing: number of rows (elements) that agree.
    """

    error: float
    scale: float
    rows: int
    agreeing: int


def compare(answer: Array, reference: Array) -> Distance:
    """Measure the distance between two arrays of one shape; the reference is as wide or wider.

    Raises:
        ValueError: the shapes differ.
    """
    if answer.shape != reference.shape:
        raise ValueError(f"the answer has shape {list(answer.shape)}, the fp32 twin's {list(reference.shape)}")
    if not is_floating(answer):
        return Distance(0.0, 0.0, answer.size, int(np.count_nonzero(answer == reference)))
    with np.errstate(invalid="ignore"):  # casts of NaNs warn
        a, r = answer.astype(np.float64), reference.astype(np.float64)
    finite = np.isfinite(r)
    both = finite & np.isfinite(a)
    scale = float(np.abs(r[finite]).max(initial=0.0))
    error = float(np.abs(a[both] - r[both]).max(initial=0.0))
    # NaN counts as equal to NaN, and an infinity to itself.
    unequal = ~both & (a != r) & ~(np.isnan(a) & np.isnan(r))
    if unequal.any():
        error = math.inf
    rows, agreeing = _agreement(a, r, answer)
    return Distance(error, scale, rows, agreeing)


def is_floating(array: Array) -> bool:
    """Return whether an array holds floating-point numbers, bfloat16 included."""
    return array.dtype.kind == "f" or str(array.dtype.name) == "bfloat16"


def _agreement(answer: Array, reference: Array, narrow_like: Array) -> tuple[int, int]:
    """Count rows, and rows with the reference's argmax or one that the answer's dtype cannot distinguish from it.

    Classes lie along the last axis, and for images (N, C, H, W) along axis 1.
    """
    axis = 1 if answer.ndim > 3 else -1
    if answer.ndim < 2 or answer.shape[axis] < 2 or not answer.size:
        return 0, 0
    a, r = np.moveaxis(answer, axis, -1), np.moveaxis(reference, axis, -1)
    chosen, wanted = a.argmax(-1)[..., None], r.argmax(-1)[..., None]
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = r.astype(narrow_like.dtype)
    tied = np.take_along_axis(narrow, chosen, -1) == np.take_along_axis(narrow, wanted, -1)
    return chosen.size, int(np.count_nonzero((chosen == wanted) | tied))


@dataclass(slots=True)
class OutputTally:
    """Counts of one output, and the scaled errors of its shadow runs."""

    counts: OutputCounters = field(default_factory=OutputCounters)
    _errors: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    _total: float = 0.0
    _scale: float = 0.0

    def add(self, distance: Distance) -> float:
        """Record a shadow run.

        Returns:
            Its error relative to the output's size, which is the largest reference of the latest runs: relative to an answer
            that happens to be near 0 throughout, any rounding would look large.
        """
        self._scale = max(distance.scale, self._scale * SCALE_MEMORY)
        scaled = distance.error / max(self._scale, LEAST_SCALE)
        self._errors[bisect_left(BOUNDS, scaled)] += 1
        if math.isfinite(scaled):
            self._total += scaled
        self.counts.rows_compared += distance.rows
        self.counts.rows_agreeing += distance.agreeing
        return scaled

    def counters(self) -> OutputCounters:
        drift = DriftHistogram(bounds=BOUNDS, counts=tuple(self._errors), total=self._total)
        return replace(self.counts, drift=drift if any(self._errors) else None)


class Tally:
    """Counts findings, and keeps and logs the latest events. Every method may be called on any thread."""

    def __init__(self, model: str, policy: str, outputs: Iterable[str], degradation: Degradation | None) -> None:
        self._model = model
        self._degradation = degradation
        self._lock = threading.Lock()
        self._counts = GuardCounters(policy=policy, outputs={})
        if degradation is not None:
            self._counts.drift_threshold = degradation.threshold
        self._outputs = {name: OutputTally() for name in outputs}
        self._events: deque[GuardEvent] = deque(maxlen=KEPT_EVENTS)
        self._logged_at: float | None = None
        self._not_logged = 0

    @property
    def degraded(self) -> bool:
        """Whether the drift is over its threshold."""
        return self._degradation is not None and self._degradation.degraded

    def bad_answer(self, values: Mapping[str, int], outcome: str, text: str) -> None:
        """Count a request with finite inputs that got non-finite values.

        `values` has their number by output, `outcome` is the event's kind: "non_finite", "rejected" or "fallback".
        """
        with self._lock:
            for name, count in values.items():
                self._outputs[name].counts.non_finite_values += count
                self._outputs[name].counts.non_finite_requests += 1
            self._counts.rejected += outcome == "rejected"
            self._counts.fallbacks += outcome == "fallback"
            self._remember(outcome, text)
            now = time.monotonic()
            if self._logged_at is not None and now < self._logged_at + LOG_EVERY_S:
                self._not_logged += 1
                return
            more = f" ({self._not_logged} more since the last line)" if self._not_logged else ""
            self._logged_at, self._not_logged = now, 0
        logger.warning("%s: %s%s", self._model, text, more, extra={"model": self._model})

    def bad_inputs(self, requests: Mapping[str, int]) -> None:
        """Count requests, by output, whose outputs and own inputs hold non-finite values."""
        with self._lock:
            for name, count in requests.items():
                self._outputs[name].counts.from_inputs += count

    def shadow_dropped(self) -> None:
        """Count a sampled request that was not run."""
        with self._lock:
            self._counts.shadow_dropped += 1

    def shadow_failed(self, reason: str) -> None:
        with self._lock:
            self._counts.shadow_failed += 1
            first = self._counts.shadow_failed == 1
            self._remember("shadow", f"a shadow run failed: {reason}")
        if first:
            said = "%s: a shadow run failed, and later ones are only counted: %s"
            logger.warning(said, self._model, reason, extra={"model": self._model})

    def shadow_run(self, distances: Mapping[str, Distance]) -> None:
        """Record the comparison of a shadow run, output by output."""
        with self._lock:
            self._counts.shadow_runs += 1
            worst, where = 0.0, ""
            for name, distance in distances.items():
                scaled = self._outputs[name].add(distance)
                if scaled >= worst:
                    worst, where = scaled, name
            if self._degradation is None or not self._degradation.add(worst):
                return
            text = self._change(self._degradation, where, worst)
        logger.warning("%s: %s", self._model, text, extra={"model": self._model})

    def counters(self) -> GuardCounters:
        with self._lock:
            outputs = {name: output.counters() for name, output in self._outputs.items()}
            return replace(self._counts, outputs=outputs, degraded=self.degraded)

    def recent_events(self) -> list[GuardEvent]:
        """Return the latest KEPT_EVENTS events, newest first."""
        with self._lock:
            return list(reversed(self._events))

    def _change(self, degradation: Degradation, output: str, worst: float) -> str:
        share = f"{degradation.share:.1%} of the latest shadow runs differ from the fp32 twin by more than"
        limit = f"{degradation.threshold:g} of the output's size"
        if degradation.degraded:
            text = f"degraded: {share} {limit} (output {output!r}: {worst:.3g}); verify the model on what clients send now"
            self._remember("degraded", text)
        else:
            text = f"recovered: {share} {limit}"
            self._remember("recovered", text)
        return text

    def _remember(self, kind: str, text: str) -> None:
        self._events.append(GuardEvent(time=time.time(), model=self._model, kind=kind, text=text))
