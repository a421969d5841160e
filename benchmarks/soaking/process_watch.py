"""What a process takes of the machine, sampled while it is used."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# Two-sided 95 % points of Student's t distribution, for 1, 2, ... degrees of freedom.
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10)
BLOCKS = 12  # neighbouring samples are much alike: their means over so many stretches are what the line is fitted to


@dataclass(frozen=True)
class Sample:
    """One look.

    Attributes:
        at_s: on time.monotonic()'s clock.
        resident_mb: memory.
        descriptors: open files and sockets.
        threads: running.
    """

    at_s: float
    resident_mb: float
    descriptors: int
    threads: int


@dataclass(frozen=True)
class Slope:
    """A line's rise, with the bounds of its 95 % confidence interval, in the sample's unit per hour."""

    per_hour: float
    low: float
    high: float


def look(pid: int) -> Sample:
    """Look at a process now.

    Raises:
        FileNotFoundError: it has ended.
    """
    process = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines() if ":" in line)
    return Sample(
        at_s=time.monotonic(),
        resident_mb=int(status["VmRSS"].split()[0]) / 1024,
        descriptors=sum(1 for _ in (process / "fd").iterdir()),
        threads=int(status["Threads"]),
    )


def watch(pid: int, every_s: float, stop: threading.Event, samples: list[Sample]) -> None:
    """Look now and then, until told to stop or the process has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while not stop.wait(every_s):
            samples.append(look(pid))


def slope(times_s: list[float], values: list[float]) -> Slope:
    """Least squares over the means of `BLOCKS` stretches, with the usual interval of a regression line's slope.

    Args:
        times_s: in rising order, at least `BLOCKS` of them.
        values: at these times.
    """
    hours = np.array([part.mean() for part in np.array_split(np.array(times_s), BLOCKS)]) / 3600
    means = np.array([part.mean() for part in np.array_split(np.array(values), BLOCKS)])
    spread = hours - hours.mean()
    rise = float(spread @ means / (spread @ spread))
    residuals = means - means.mean() - rise * spread
    error = float(np.sqrt(residuals @ residuals / (BLOCKS - 2) / (spread @ spread)))
    half = T_95[BLOCKS - 3] * error
    return Slope(rise, rise - half, rise + half)
