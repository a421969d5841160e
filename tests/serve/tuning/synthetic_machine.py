"""A machine whose throughput and latency are a function of the settings, so that the best settings are known."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from halfserve.serve.tuning.search import LADDER, RefusedSettingsError, TuningPoint
from halfserve.serve.tuning.settings import Choice, SearchSpace, TunedAxis, TunedSettings

RELOAD_S = 0.5
TAIL = 1.3  # p99 of a load, in mean latencies


@dataclass
class SyntheticMachine:
    """Copies that compute batches of `fixed_ms + row_ms * rows` on one thread, in a closed loop."""

    cores: int = 4
    fixed_ms: float = 1.0
    row_ms: float = 0.2
    parallel: float = 0.7  # exponent of the speed-up by threads
    crowding: float = 0.1  # share by which each further copy slows the others
    noise: float = 0.0  # standard deviation of the logarithm of each figure
    refused_above: int = 10**6  # largest batch that the machine accepts
    spent_s: float = 0.0
    measured: list[tuple[Choice, int, float, int]] = field(default_factory=list)
    _random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))

    def measure(self, choice: Choice, concurrency: int, seconds: float, number: int) -> TuningPoint:
        (settings,) = choice
        if settings.max_batch_size > self.refused_above:
            raise RefusedSettingsError(f"batches of {settings.max_batch_size} rows do not fit")
        last = self.measured[-1][0] if self.measured else None
        self.measured.append((choice, concurrency, seconds, number))
        self.spent_s += seconds * 1.3 + (RELOAD_S if choice != last else 0.0)
        rate, mean_ms, rows = self.exact(settings, concurrency)
        rate, mean_ms = (value * float(np.exp(self._random.normal(0, self.noise))) for value in (rate, mean_ms))
        compute_ms = self.compute_ms(settings, rows)
        return TuningPoint(
            choice=choice,
            concurrency=concurrency,
            requests_per_second=rate,
            latency_ms=TAIL * mean_ms,
            mean_batch_size=rows,
            compute_ms=compute_ms,
        )

    def compute_ms(self, settings: TunedSettings, rows: float) -> float:
        threads = settings.threads or self.cores
        crowd = 1 + self.crowding * (settings.instances - 1)
        return (self.fixed_ms + self.row_ms * rows) / float(threads**self.parallel) * crowd

    def exact(self, settings: TunedSettings, in_flight: int) -> tuple[float, float, float]:
        """Requests a second, mean latency in milliseconds and rows of a batch."""
        share = in_flight / min(settings.instances, in_flight)
        copies = min(settings.instances, in_flight)
        most = max(1, settings.max_batch_size)
        if settings.delay_us and share <= most:
            mean_ms = settings.delay_us / 1e3 * (share < most) + self.compute_ms(settings, share)
            return copies * share / mean_ms * 1e3, mean_ms, share
        rows = min(max(1.0, share / 2), most)
        mean_ms = max(1.0, share / rows) * self.compute_ms(settings, rows)
        return in_flight / mean_ms * 1e3, mean_ms, rows

    def best_rate(self, choice: Choice, limit_ms: float) -> float:
        """The highest throughput of a choice within the limit, by trying every load."""
        found = [self.exact(choice[0], in_flight) for in_flight in LADDER]
        return max((rate for rate, mean_ms, _ in found if TAIL * mean_ms <= limit_ms), default=0.0)


def space_of(cores: int = 4, start: TunedSettings | None = None) -> SearchSpace:
    """All settings of one model on so many cores."""
    shares = tuple(2**power for power in range(cores.bit_length()))
    values = {
        "instances": shares,
        "threads": (0, *shares),
        "max_batch_size": (1, 2, 4, 8, 16, 32, 64, 128),
        "delay_us": (0, 200, 1000, 3000),
    }
    axes = tuple(TunedAxis(model=0, name=name, values=numbers) for name, numbers in values.items())
    return SearchSpace(models=("m",), axes=axes, start=(start or TunedSettings(max_batch_size=32),), cores=cores)
