"""Results of every request of a soak."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field

MAX_TEXTS = 20


@dataclass(frozen=True)
class Counted:
    """Counts so far.

    Attributes:
        latencies: (time of the request, seconds until the answer) of right answers, on time.monotonic()'s clock.
    """

    answered: dict[str, int]  # right answers, by kind of request
    survived: dict[str, int]  # injected faults that ended as expected, by kind
    wrong: list[str]  # descriptions of the first few failures (wrong answers, lost ones, unclear errors)
    wrongs: int  # number of failures
    latencies: list[tuple[float, float]]


@dataclass
class Tally:
    _answered: Counter[str] = field(default_factory=Counter)
    _survived: Counter[str] = field(default_factory=Counter)
    _wrong: list[str] = field(default_factory=list)
    _wrongs: int = 0
    _latencies: list[tuple[float, float]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def right(self, kind: str, started: float) -> None:
        """Count a right answer to a request that was sent at `started`."""
        now = time.monotonic()
        with self._lock:
            self._answered[kind] += 1
            self._latencies.append((started, now - started))

    def survived(self, kind: str) -> None:
        """Count an injected fault that ended as expected, mostly in a clear error."""
        with self._lock:
            self._survived[kind] += 1

    def fault(self, text: str) -> None:
        with self._lock:
            self._wrongs += 1
            if len(self._wrong) < MAX_TEXTS:
                self._wrong.append(text)

    def answered(self) -> Counter[str]:
        with self._lock:
            return self._answered.copy()

    def counted(self) -> Counted:
        with self._lock:
            return Counted(dict(self._answered), dict(self._survived), list(self._wrong), self._wrongs, list(self._latencies))
