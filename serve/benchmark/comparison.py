"""Compares servers or models: interleaved rounds, and differences between their answers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from halfserve.protos.inference_pb2 import ModelInferRequest
from halfserve.serve.benchmark.level import Level, Load
from halfserve.serve.client.array_conversion import Array
from halfserve.serve.client.client import Client
from halfserve.serve.client.errors import ClientError, ServerUnavailable
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


@dataclass(kw_only=True)
class Difference:
    """Differences in one output, over all requests compared; the answers are not kept."""

    output: str  # name of the output
    max_abs: float = 0.0  # largest absolute difference of two elements
    # max_abs divided by the largest magnitude in the reference's answer to the same request; the maximum over requests.
    scaled: float = 0.0
    mismatched: int = 0  # elements that are finite on one side only, and differing elements that are not numbers
    rows: int = 0  # rows [..., classes] that were compared
    class_changes: int = 0  # rows with another argmax
    differing: int = 0  # requests whose answers differ in this output

    @property
    def agreement(self) -> float | None:
        """Fraction of rows with the same argmax; None for outputs without classes."""
        return 1 - self.class_changes / self.rows if self.rows else None

    def add(self, ours: Array, theirs: Array) -> bool:
        """Compare two answers of one shape; return whether they differ."""
        if not (_has_numbers(ours) and _has_numbers(theirs)):
            mismatched = int((ours != theirs).sum())
            differs = mismatched > 0
        else:
            a, b = ours.astype(np.float64), theirs.astype(np.float64)
            finite = np.isfinite(a) & np.isfinite(b)
            mismatched = int((np.isfinite(a) != np.isfinite(b)).sum())
            differs = not np.array_equal(a, b, equal_nan=True)
            if finite.any():
                largest = float(np.abs(a[finite] - b[finite]).max())
                self.max_abs = max(self.max_abs, largest)
                self.scaled = max(self.scaled, largest / max(float(np.abs(b[finite]).max()), SMALLEST))
            if a.ndim >= 2 and a.shape[-1] > 1 and a.size:  # empty if a detector found nothing
                changes = a.argmax(-1) != b.argmax(-1)
                self.rows += changes.size
                self.class_changes += int(changes.sum())
        self.mismatched += mismatched
        self.differing += differs
        return differs

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "agreement": self.agreement}


@dataclass(frozen=True, kw_only=True)
class Differences:
    """Differences between the answers of one load target and those of the first."""

    name: str  # name of the target
    outputs: Sequence[Difference]  # one difference per output that both have
    not_compared: Sequence[str]  # outputs that only one target has, or whose shapes differ
    requests: int = 0  # requests that both targets were asked once
    differing: int = 0  # requests with answers that differ, the failed ones among them
    failed: int = 0  # requests that only one target answered

    def to_json(self) -> dict[str, Any]:
        """Return the object of bench.json's "differences"; see serve/benchmark/benchmark_report.py."""
        return {**vars(self), "outputs": [one.to_json() for one in self.outputs], "not_compared": list(self.not_compared)}


def unlike_inputs(requests: Sequence[ModelInferRequest], others: Sequence[ModelInferRequest]) -> str:
    """Return the inputs of both where the requests do not have the same ones, of the same shapes; "" where they do."""
    ours, theirs = ({tensor.name: tensor for tensor in of[0].inputs} for of in (requests, others))
    if {name: list(one.shape) for name, one in ours.items()} == {name: list(one.shape) for name, one in theirs.items()}:
        return ""
    return " in place of ".join(
        ", ".join(f"{one.name} {one.datatype}[{','.join(map(str, one.shape))}]" for one in of.values()) for of in (theirs, ours)
    )


def differences(
    name: str,
    client: Client,
    requests: Sequence[ModelInferRequest],
    reference: Client,
    reference_requests: Sequence[ModelInferRequest],
) -> Differences:
    """Send the same inputs to two models and compare the answers; the reference's requests have them in its own datatypes.

    `name` is that of the load target with the reference. A request with an id is compared with that of the same id, others with
    that of the same place.

    Raises:
        ClientError: a target cannot be reached, or no request was answered by both.
    """
    found: dict[str, Difference] = {}
    alone: set[str] = set()
    asked = differing = failed = 0
    for ours, theirs in _pairs(requests, reference_requests):
        first, second = _answered(client, ours), _answered(reference, theirs)
        asked += 1
        if first is None or second is None:
            failed += first is not second
            differing += first is not second
            continue
        unlike = {output for output in first.keys() | second.keys() if not _have_one_shape(output, first, second)}
        compared = [found.setdefault(output, Difference(output=output)) for output in sorted(first.keys() - unlike)]
        differs = [one.add(first[one.output], second[one.output]) for one in compared]
        differing += bool(unlike) or any(differs)
        alone |= unlike
    if not found and not alone and asked:
        client.infer_message(requests[0])  # raises the error
        reference.infer_message(reference_requests[0])
    return Differences(
        name=name,
        outputs=[one for _, one in sorted(found.items())],
        not_compared=sorted(alone),
        requests=asked,
        differing=differing,
        failed=failed,
    )


def _pairs(
    requests: Sequence[ModelInferRequest], others: Sequence[ModelInferRequest]
) -> Iterator[tuple[ModelInferRequest, ModelInferRequest]]:
    by_id = {other.id: other for other in others if other.id}
    if not by_id:
        return zip(requests, others, strict=False)
    return ((request, by_id[request.id]) for request in requests if request.id in by_id)


def _answered(client: Client, request: ModelInferRequest) -> dict[str, Array] | None:
    """Return the outputs; None for a request that the server refuses. Raises ServerUnavailable: it cannot be reached."""
    try:
        return output_arrays(client.infer_message(request))
    except ServerUnavailable:
        raise
    except ClientError:
        return None


def _have_one_shape(output: str, first: Mapping[str, Array], second: Mapping[str, Array]) -> bool:
    return output in first and output in second and first[output].shape == second[output].shape


def _has_numbers(array: Array) -> bool:
    return array.dtype.kind in "fiub" or array.dtype.name == "bfloat16"
