"""Duration of conversions from bytes to bytes, with the converters in turn."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.converters.peers import Convert

SLOW_SECONDS = 10


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Time of a converter for a model, and size of the result.

    Attributes:
        seconds: Median over the rounds; NaN if it fails.
        size_ratio: Size of the result divided by that of the input.
        problem: The reason of a failure, or "".
    """

    seconds: float = float("nan")
    size_ratio: float = float("nan")
    problem: str = ""


def timings(converters: Mapping[str, Convert], model: bytes, rounds: int) -> dict[str, Timing]:
    """Run each converter `rounds` times, in a new order each round, after a first round that loads everything needed.

    A converter that takes longer than `SLOW_SECONDS` runs only once.
    """
    seconds: dict[str, list[float]] = {name: [] for name in converters}
    sizes: dict[str, int] = {}
    problems: dict[str, str] = {}
    order = list(converters)
    for number in range(rounds + 1):
        random.Random(number).shuffle(order)  # noqa: S311  (an order of turns, no secret)
        for name in [name for name in order if name not in problems and max(seconds[name], default=0) < SLOW_SECONDS]:
            start = time.monotonic()
            try:
                sizes[name] = len(converters[name](model, True))
            except Exception as error:  # noqa: BLE001  (converters raise anything)
                problems[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
                continue
            elapsed = time.monotonic() - start
            if number or elapsed >= SLOW_SECONDS:
                seconds[name].append(elapsed)
    return {
        name: Timing(problem=problems[name])
        if name in problems
        else Timing(seconds=statistics.median(seconds[name]), size_ratio=sizes[name] / len(model))
        for name in converters
    }
