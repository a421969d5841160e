"""Compares servers or models: interleaved rounds, and differences between their answers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from halfserve.protos.inference_pb2 import ModelInferRequest
from halfserve.serve.benchmark.level import Level, Load
from halfserve.serve.client.array_conversion import Array
from halfserve.serve.client.client import Client
from halfserve.serve.client.infer_messages import output_arrays

MeasureOne = Callable[[int, Load], Level]
MAX_REQUESTS = 16
SMALLEST = 1e-30


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A value over several rounds: median, smallest and largest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median=statistics.median(values), low=min(values), high=max(values))

    @property
    def text(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


@dataclass(frozen=True, kw_only=True)
class ComparedLevel:
    name: str  # name of the target
    load: Load  # requested load
    rounds: Sequence[Level]  # one level per round
    per_second: Spread  # successful requests per second
    p50_ms: Spread  # median latency in milliseconds
    p99_ms: Spread  # 99th percentile of the latency in milliseconds
    rate_ratio: Spread  # requests per second, relative to the base in the same round
    p99_ratio: Spread  # p99, relative to the base in the same round

    @property
    def mean_batch_size(self) -> float | None:
        """Rows per batch, the median over the rounds; None from a server without statistics."""
        sizes = [level.server.mean_batch_size for level in self.rounds if level.server and level.server.mean_batch_size]
        return statistics.median(sizes) if sizes else None

    @property
    def failed(self) -> int:
        return sum(level.failed for level in self.rounds)

    def to_json(self) -> dict[str, Any]:
        """Return the object of bench.json's "comparison"; see serve/benchmark/benchmark_report.py."""
        return {
            "name": self.name,
            "concurrency": self.load.concurrency,
            "rate": self.load.rate,
            "requests_per_second": vars(self.per_second),
            "p50_ms": vars(self.p50_ms),
            "p99_ms": vars(self.p99_ms),
            "rate_ratio": vars(self.rate_ratio),
            "p99_ratio": vars(self.p99_ratio),
            "mean_batch_size": self.mean_batch_size,
            "errors": self.failed,
            "rounds": [level.to_json() for level in self.rounds],
        }


def compare(names: Sequence[str], load: Load, rounds: int, measure: MeasureOne, *, base: int = 0) -> Iterator[ComparedLevel]:
    """Measure all targets under one load, in turn (A B A B ...), so that a drift in the machine's speed affects all of them.

    `measure` measures the target of the given index; the targets are compared with that of the index `base`. If it raises an
    exception, the complete rounds before it are yielded first.
    """
    complete: list[list[Level]] = []
    try:
        for _ in range(rounds):
            complete.append([measure(number, load) for number in range(len(names))])  # noqa: PERF401  (kept if one fails)
    except BaseException:
        yield from _over_rounds(names, complete, base)
        raise
    yield from _over_rounds(names, complete, base)


def _over_rounds(names: Sequence[str], complete: Sequence[Sequence[Level]], base: int) -> Iterator[ComparedLevel]:
    levels = list(zip(*complete, strict=True))
    for name, measured in zip(names, levels, strict=False):  # without any round there are no levels
        yield compared(name, measured, levels[base])


def compared(name: str, levels: Sequence[Level], base: Sequence[Level]) -> ComparedLevel:
    """Summarize one target's rounds, relative to those of the base."""
    pairs = list(zip(levels, base, strict=True))
    return ComparedLevel(
        name=name,
        load=levels[0].load,
        rounds=levels,
        per_second=Spread.of([level.requests_per_second for level in levels]),
        p50_ms=Spread.of([level.latency.p50 for level in levels]),
        p99_ms=Spread.of([level.latency.p99 for level in levels]),
        rate_ratio=Spread.of([level.requests_per_second / other.requests_per_second for level, other in pairs]),
        p99_ratio=Spread.of([level.latency.p99 / other.latency.p99 for level, other in pairs]),
    )


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Differences in one output, over all requests compared."""

    output: str  # name of the output
    max_abs: float  # largest absolute difference of two elements
    # max_abs divided by the largest magnitude in the reference's answer to the same request; the maximum over requests.
    scaled: float
    mismatched: int  # elements that are finite on one side only, and differing elements that are not numbers
    agreement: float | None  # fraction of rows [..., classes] with the same argmax; None for outputs without classes


@dataclass(frozen=True, kw_only=True)
class Differences:
    """Differences between the answers of one load target and those of the first."""

    name: str  # name of the target
    outputs: Sequence[Difference]  # one difference per output that both have
    not_compared: Sequence[str]  # outputs that only one target has, or whose shapes differ

    def to_json(self) -> dict[str, Any]:
        outputs = [vars(difference) for difference in self.outputs]
        return {"name": self.name, "outputs": outputs, "not_compared": list(self.not_compared)}


def differences(
    name: str,
    client: Client,
    requests: Sequence[ModelInferRequest],
    reference: Client,
    reference_requests: Sequence[ModelInferRequest],
) -> Differences:
    """Send the same inputs to two models and compare the answers; the reference's requests have them in its own datatypes.

    `name` is that of the load target with the reference. Raises ClientError: a request fails.
    """
    found: dict[str, list[tuple[Array, Array]]] = {}
    alone: set[str] = set()
    for ours, theirs in list(zip(requests, reference_requests, strict=False))[:MAX_REQUESTS]:
        first, second = output_arrays(client.infer_message(ours)), output_arrays(reference.infer_message(theirs))
        alone |= first.keys() ^ second.keys()
        for output in first.keys() & second.keys():
            if first[output].shape == second[output].shape:
                found.setdefault(output, []).append((first[output], second[output]))
            else:
                alone.add(output)
    outputs = [_difference(output, pairs) for output, pairs in sorted(found.items())]
    return Differences(name=name, outputs=outputs, not_compared=sorted(alone))


def _has_numbers(array: Array) -> bool:
    return array.dtype.kind in "fiub" or array.dtype.name == "bfloat16"


def _difference(name: str, pairs: Sequence[tuple[Array, Array]]) -> Difference:
    max_abs = scaled = 0.0
    mismatched, agreements = 0, []
    for ours, theirs in pairs:
        if not (_has_numbers(ours) and _has_numbers(theirs)):
            mismatched += int((ours != theirs).sum())
            continue
        a, b = ours.astype(np.float64), theirs.astype(np.float64)
        finite = np.isfinite(a) & np.isfinite(b)
        mismatched += int((np.isfinite(a) != np.isfinite(b)).sum())
        if finite.any():
            largest = float(np.abs(a[finite] - b[finite]).max())
            max_abs = max(max_abs, largest)
            scaled = max(scaled, largest / max(float(np.abs(b[finite]).max()), SMALLEST))
        if a.ndim >= 2 and a.shape[-1] > 1 and a.size:  # empty if a detector found nothing
            agreements.append(float((a.argmax(-1) == b.argmax(-1)).mean()))
    agreement = sum(agreements) / len(agreements) if agreements else None
    return Difference(output=name, max_abs=max_abs, scaled=scaled, mismatched=mismatched, agreement=agreement)
