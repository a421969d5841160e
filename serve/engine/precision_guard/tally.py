"""The guard's counters as they are written: from worker threads and the shadow's, and only when something is amiss."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from serve.engine.precision_guard.counters import GuardCounters, GuardEvent, OutputCounters
from serve.engine.precision_guard.degradation import Degradation
from serve.engine.precision_guard.drift import Distance, OutputDrift
from serve.engine.precision_guard.settings import Policy

logger = logging.getLogger(__name__)

KEPT_EVENTS = 100
# A model whose every answer is bad must not fill the log.
LOG_EVERY_S = 60.0


@dataclass(slots=True)
class OutputTally:
    """What is counted of one output (see `OutputCounters`)."""

    values: int = 0
    requests: int = 0
    from_inputs: int = 0
    drift: OutputDrift = field(default_factory=OutputDrift)
    runs: int = 0


class Tally:
    """Counts, remembers the latest events and writes the log's lines about them. Every method may be called on any thread."""

    def __init__(self, model: str, policy: Policy, outputs: Iterable[str], degradation: Degradation | None) -> None:
        self._model = model
        self._policy = policy
        self._degradation = degradation
        self._lock = threading.Lock()
        self._outputs = {name: OutputTally() for name in outputs}
        self._events: deque[GuardEvent] = deque(maxlen=KEPT_EVENTS)
        self._rejected = self._fallbacks = 0
        self._shadow_runs = self._shadow_dropped = self._shadow_failed = 0
        self._logged_at: float | None = None
        self._not_logged = 0

    @property
    def degraded(self) -> bool:
        """The drift is over its threshold."""
        return self._degradation is not None and self._degradation.degraded

    def bad_answer(self, values: Mapping[str, int], outcome: str, text: str) -> None:
        """A request with finite inputs got values that are not finite.

        Args:
            values: how many, by output.
            outcome: the event's kind: "non_finite", "rejected" or "fallback".
            text: the event's.
        """
        with self._lock:
            for name, count in values.items():
                self._outputs[name].values += count
                self._outputs[name].requests += 1
            self._rejected += outcome == "rejected"
            self._fallbacks += outcome == "fallback"
            self._remember(outcome, text)
            now = time.monotonic()
            if self._logged_at is not None and now < self._logged_at + LOG_EVERY_S:
                self._not_logged += 1
                return
            more = f" ({self._not_logged} more since the last line)" if self._not_logged else ""
            self._logged_at, self._not_logged = now, 0
        logger.warning("%s: %s%s", self._model, text, more)

    def bad_inputs(self, requests: Mapping[str, int]) -> None:
        """So many requests got values that are not finite in these outputs, as their own inputs were not."""
        with self._lock:
            for name, count in requests.items():
                self._outputs[name].from_inputs += count

    def shadow_dropped(self) -> None:
        """A request chosen for the shadow was not run there."""
        with self._lock:
            self._shadow_dropped += 1

    def shadow_failed(self, reason: str) -> None:
        """A shadow run ended in an error."""
        with self._lock:
            self._shadow_failed += 1
            first = self._shadow_failed == 1
            self._remember("shadow", f"a shadow run failed: {reason}")
        if first:
            logger.warning("%s: a shadow run failed, and later ones are only counted: %s", self._model, reason)

    def shadow_run(self, distances: Mapping[str, Distance]) -> None:
        """A shadow run was compared, output by output."""
        with self._lock:
            self._shadow_runs += 1
            worst, where = 0.0, ""
            for name, distance in distances.items():
                output = self._outputs[name]
                output.runs += 1
                scaled = output.drift.add(distance)
                if scaled >= worst:
                    worst, where = scaled, name
            if self._degradation is None or not self._degradation.add(worst):
                return
            text = self._change(self._degradation, where, worst)
        logger.warning("%s: %s", self._model, text)

    def counters(self) -> GuardCounters:
        """All as it is now."""
        with self._lock:
            return GuardCounters(
                policy=str(self._policy),
                outputs={name: _counters(output) for name, output in self._outputs.items()},
                rejected=self._rejected,
                fallbacks=self._fallbacks,
                shadow_runs=self._shadow_runs,
                shadow_dropped=self._shadow_dropped,
                shadow_failed=self._shadow_failed,
                degraded=self.degraded,
                drift_threshold=None if self._degradation is None else self._degradation.threshold,
            )

    def recent_events(self) -> list[GuardEvent]:
        """The latest hundred, newest first."""
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


def _counters(output: OutputTally) -> OutputCounters:
    return OutputCounters(
        non_finite_values=output.values,
        non_finite_requests=output.requests,
        from_inputs=output.from_inputs,
        drift=output.drift.histogram() if output.runs else None,
        rows_compared=output.drift.rows,
        rows_agreeing=output.drift.agreeing,
    )
