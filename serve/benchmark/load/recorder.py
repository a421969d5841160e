"""What one process has measured since it last told."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable

import numpy as np

from serve.benchmark.load.calls import OK, Call
from serve.benchmark.load.histogram import LatencyHistogram
from serve.benchmark.load.order import Tally

NANOSECONDS = 1e9


class Recorder:
    """Takes the calls that end and folds them into a tally, window by window."""

    def __init__(self, models: int, now_ns: int) -> None:
        self._models = models
        self._reset(now_ns)

    def ended(self, calls: Iterable[Call], now_ns: int) -> None:
        """Calls have their status."""
        latencies = self._latencies
        for call in calls:
            if call.status == OK:
                latencies[call.model].append(now_ns - call.intended_ns)
            else:
                self.failed(call.status or "UNKNOWN", call.message or "no explanation")

    def failed(self, status: str, message: str) -> None:
        """A request has failed."""
        self._errors[status] += 1
        self._messages.setdefault(status, message)

    def window(self, now_ns: int) -> Tally:
        """Everything since the last call of this."""
        passed_ns = max(1, now_ns - self._began_ns)
        tally = Tally(
            latencies=[_histogram(latencies) for latencies in self._latencies],
            errors=self._errors,
            messages=self._messages,
            sent=self.sent,
            lateness=_histogram(self.lateness_ns),
            seconds=passed_ns / NANOSECONDS,
            busy=1 - min(1.0, self.idle_ns / passed_ns),
            held_back=self.held_back,
        )
        self._reset(now_ns)
        return tally

    def _reset(self, now_ns: int) -> None:
        self._began_ns = now_ns
        self._latencies = [array("q") for _ in range(self._models)]
        self._errors: Counter[str] = Counter()
        self._messages: dict[str, str] = {}
        self.lateness_ns = array("q")
        self.sent = self.held_back = self.idle_ns = 0


def _histogram(nanoseconds: array[int]) -> LatencyHistogram:
    return LatencyHistogram.of(np.frombuffer(nanoseconds, np.int64))
