"""A model of latency: how long a batch takes by its rows, from the server's own counters of a few short loads."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from halfserve.serve.tuning.settings import TunedSettings

BATCHES_A_REQUEST = 2.0  # a request waits for the batch before, and is computed in the next


@dataclass(frozen=True, kw_only=True)
class PredictedLoad:
    """What settings are expected to reach within the limit."""

    rate: float  # rows per second
    in_flight: int  # rows in flight that reach it


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

    def predict(self, settings: TunedSettings, limit_ms: float) -> PredictedLoad | None:
        """Return the load that settings should reach within the limit; None if nothing is known of their batches."""
        times = self._times.get(_key(settings))
        if not times:
            return None
        fixed_ms, row_ms = _fitted(times)
        room_ms = (limit_ms - settings.delay_us / 1e3) / BATCHES_A_REQUEST - fixed_ms
        rows = max(1, min(settings.max_batch_size, int(room_ms / row_ms)))
        rate = settings.instances * rows / (fixed_ms + rows * row_ms) * 1e3
        return PredictedLoad(rate=rate, in_flight=round(BATCHES_A_REQUEST * settings.instances * rows))


def _key(settings: TunedSettings) -> tuple[int, bool, str]:
    return settings.threads, settings.padded, settings.precision


def _fitted(times: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the fixed time and the time of a row, at least 0 and above 0, with the least sum of squared relative errors."""
    rows, took_ms = np.array(times).T
    slope = float((took_ms / rows).min())
    if len(set(rows.tolist())) > 1:
        fixed, row = np.linalg.lstsq(np.stack([1 / took_ms, rows / took_ms], axis=1), np.ones(len(rows)), rcond=None)[0]
        if fixed >= 0 and row > 0:
            return float(fixed), float(row)
        if fixed > 0:  # larger batches take no longer
            return float(np.median(took_ms)), 1e-6
    return 0.0, slope
