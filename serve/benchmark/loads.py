"""The loads of a sweep, as they are given on the command line: "1,4,16", "1:64:x2", "100:500:100"."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from serve.benchmark.errors import BenchmarkArgumentError

NUMBER = r"\d+(?:\.\d+)?"
RANGE = re.compile(rf"({NUMBER}):({NUMBER})(?::(x?)({NUMBER}))?")
MAX_LEVELS = 1000
EXPECTED = "expected numbers above 0 with commas between, such as 1,4,16, or a range such as 1:64:x2 or 10:50:10"


@dataclass(frozen=True, kw_only=True)
class Load:
    """One load: `concurrency` requests in flight (closed loop), or `rate` requests a second (open loop)."""

    concurrency: int | None = None
    rate: float | None = None

    @property
    def text(self) -> str:
        """As it is said: "16 in flight"."""
        return f"{self.concurrency} in flight" if self.rate is None else f"{self.rate:g} requests/s"

    @property
    def amount(self) -> float:
        """The number alone."""
        return float(self.concurrency or 0) if self.rate is None else self.rate


def parse_concurrencies(text: str, option: str = "--concurrency") -> list[int]:
    """Read whole numbers and ranges of them.

    Raises:
        BenchmarkArgumentError: it does not read like that, or a number is below 1.
    """
    numbers = list(_numbers(text, option))
    if not all(number >= 1 and number.is_integer() for number in numbers):
        raise BenchmarkArgumentError(f"{option} {text}: {EXPECTED}")
    return [int(number) for number in numbers]


def parse_rates(text: str) -> list[float]:
    """Read numbers and ranges of them.

    Raises:
        BenchmarkArgumentError: it does not read like that, or a number is 0.
    """
    numbers = list(_numbers(text, "--rate"))
    if not all(0 < number < math.inf for number in numbers):
        raise BenchmarkArgumentError(f"--rate {text}: {EXPECTED}")
    return numbers


def _numbers(text: str, option: str) -> Iterator[float]:
    for part in text.split(","):
        cleaned = part.strip()
        if re.fullmatch(NUMBER, cleaned, re.ASCII):
            yield float(cleaned)
        elif match := RANGE.fullmatch(cleaned):
            yield from _range(match, f"{option} {text}")
        else:
            raise BenchmarkArgumentError(f"{option} {text}: {EXPECTED}")


def _range(match: re.Match[str], given: str) -> list[float]:
    low, high, factor = float(match[1]), float(match[2]), match[3] == "x"
    step = float(match[4] or 1)
    if low <= 0 or high < low or step <= factor or math.inf in (high, step):
        raise BenchmarkArgumentError(
            f"{given}: expected LOW:HIGH:STEP or LOW:HIGH:xFACTOR with 0 < LOW <= HIGH, STEP > 0 and FACTOR > 1"
        )
    count = math.floor(math.log(high / low, step) + 1e-9) if factor else math.floor((high - low) / step + 1e-9)
    if count >= MAX_LEVELS:
        raise BenchmarkArgumentError(f"{given}: is {count + 1} levels, expected at most {MAX_LEVELS}")
    return [low * step**index if factor else low + step * index for index in range(count + 1)]
