"""A model of latency: how long a batch takes by its rows, from the server's own counters of a few short loads."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from halfserve.serve.tuning.settings import TunedSettings

BATCHES_A_REQUEST = 2.0  # a request waits for the batch before, and is computed in the next


class BatchModel:
    """Compute times of batches on one copy, by the number of its threads and its precision: a + b * rows milliseconds.

    It only chooses what is measured first: it knows neither the cost of a request outside of batches nor what copies take from
    each other.
    """

    def __init__(self) -> None:
        self._times: dict[tuple[int, bool, str], list[tuple[float, float]]] = defaultdict(list)

    def learn(self, settings: TunedSettings, rows: float | None, compute_ms: float | None) -> None:
        """Add the mean rows and compute time of the batches of one load; None where the server does not say."""
        if rows and compute_ms and settings.instances == 1:
            self._times[_key(settings)].append((rows, compute_ms))

    def predict(self, settings: TunedSettings, limit_ms: float) -> tuple[float, int] | None:
        """Return the rows per second that settings should reach within the limit, and the rows in flight that reach these; None
        if nothing is known of their batches.
        """
        times = self._times.get(_key(settings))
        if not times:
            return None
        fixed_ms, row_ms = _fitted(times)
        room_ms = (limit_ms - settings.delay_us / 1e3) / BATCHES_A_REQUEST - fixed_ms
        rows = max(1, min(settings.max_batch_size, int(room_ms / row_ms)))
        rate = settings.instances * rows / (fixed_ms + rows * row_ms) * 1e3
        return rate, round(BATCHES_A_REQUEST * settings.instances * rows)


def _key(settings: TunedSettings) -> tuple[int, bool, str]:
    return settings.threads, settings.padded, settings.precision


def _fitted(times: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the fixed time and the time of a row, with the least sum of squared relative errors, and none below 0."""
    rows, took_ms = np.array(times).T
    fixed_ms, row_ms = np.linalg.lstsq(np.stack([1 / took_ms, rows / took_ms], axis=1), np.ones(len(rows)), rcond=None)[0]
    return max(0.0, float(fixed_ms)), max(1e-6, float(row_ms))
