"""Which lengths share a batch: the rule, in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from halfserve.serve.engine.padding.mixed_lengths import CONFIDENT, BatchCosts, Measured, MixedLengths
from halfserve.serve.engine.padding.padding import Padding, PaddingSettings
from halfserve.serve.engine.padding.padding_rule import parse_padding_rule
from halfserve.serve.engine.queueing.batch_queue import Batch, BatchQueue
from halfserve.serve.engine.queueing.pace import BatchLimits
from halfserve.serve.engine.requests import InferRequest
from tests.serve.engine.simulation import new_request, offer, take

MS = 1e-3
Seconds = Callable[[int, int], float]  # of a batch, from its rows and its length


def core(rows: int, length: int) -> float:
    """A small transformer on one core: 2 ms for any batch, 0.2 ms a token."""
    return 2 * MS + 0.2 * MS * rows * length * (1 + length / 500)


def device(rows: int, length: int) -> float:
    """A device that a small batch does not fill."""
    return 3 * MS + 0.002 * MS * rows * length


def measured(seconds: Seconds) -> list[Measured]:
    return [(rows, length, seconds(rows, length)) for length in (4, 16, 64) for rows in (1, 8)]


def mixed(seed: Sequence[Measured] = (), **settings: Any) -> MixedLengths:
    return MixedLengths(Padding(PaddingSettings(rule=parse_padding_rule("x[1]=0"), **settings), ["x"]), BatchCosts(seed))


def queue(of: MixedLengths | None, **limits: Any) -> BatchQueue:
    return BatchQueue(BatchLimits(**{"max_rows": 32, **limits}), None, of)


def request(length: int, **rest: Any) -> InferRequest:
    return new_request(bucket=(length,), **rest)


def lengths_in(batch: Batch) -> list[int]:
    return [int(one.bucket[0]) for one in batch.requests]  # type: ignore[index]  # (a tuple of sizes)


@pytest.mark.parametrize(
    ("of", "lengths", "batches"),
    [
        (lambda: mixed(measured(core)), [9, 7, 8], [[9, 7, 8]]),  # in order of arrival
        (lambda: mixed(measured(core)), [5, 200, 6, 180], [[5, 6], [200], [180]]),
        (lambda: mixed(measured(device)), [5, 200, 6, 180], [[5, 200, 6, 180]]),
        (lambda: mixed(max_tokens=64), [20] * 9, [[20] * 3] * 3),
        (lambda: mixed(max_tokens=64), [200], [[200]]),
        (mixed, [5, 6, 5], [[5, 5], [6]]),
        (lambda: mixed(buckets=(8, 16)), [5, 12, 6, 8], [[5, 6, 8], [12]]),
        (
            lambda: mixed(measured(device), longest=16, max_tokens=40),
            [20, 12, 19, 20, 16, 20],
            [[20, 20], [12, 16], [19], [20]],
        ),
    ],
    ids=[
        *("nearly one length", "short and long", "a device that is not filled"),
        *("tokens of one length", "more tokens than allowed", "nothing measured", "buckets", "beyond the proved length"),
    ],
)
def test_lengths_share_a_batch_where_that_pays(
    of: Callable[[], MixedLengths], lengths: list[int], batches: list[list[int]]
) -> None:
    q = queue(of())
    for at, length in enumerate(lengths):
        offer(q, request(length), at)
    assert [lengths_in(take(q, len(lengths))) for _ in batches] == batches
    assert len(q) == 0


def test_the_most_urgent_request_is_always_in_the_batch() -> None:
    q = queue(mixed(measured(core)))
    offer(q, request(200), 0)
    for at in range(1, 60):
        offer(q, request(5 + at % 4), at)
    assert 200 in lengths_in(take(q, 60))


def test_a_batch_has_no_more_rows_and_tokens_than_allowed() -> None:
    q = queue(mixed(measured(device), max_tokens=64), max_rows=8)
    for at in range(40):
        offer(q, request(5 + at % 8), at)
    while len(q):
        batch = take(q, 40)
        assert batch.rows <= 8
        assert batch.rows * max(lengths_in(batch)) <= 64


def test_a_deadline_that_the_shared_batch_would_miss_is_kept_alone() -> None:
    q = queue(mixed(measured(device)))
    offer(q, request(5, deadline=10.004), 10)
    for _ in range(30):
        offer(q, request(200), 10)
    assert lengths_in(take(q, 10)) == [5]


def test_less_urgent_requests_do_not_lengthen_an_urgent_batch() -> None:
    q = queue(mixed(measured(device)), levels=2)
    offer(q, request(200, priority=1), 0)
    offer(q, request(6, priority=0), 1)
    offer(q, request(5, priority=0), 2)
    assert lengths_in(take(q, 3)) == [6, 5]


def test_after_rows_have_been_found_dependent_no_lengths_are_mixed() -> None:
    q = queue(mixed(measured(device)))
    q.part()
    for at, length in enumerate((5, 6)):
        offer(q, request(length), at)
    assert [lengths_in(take(q, 2)) for _ in range(2)] == [[5], [6]]


def test_times_of_batches_are_learned_while_serving() -> None:
    of = mixed()
    q = queue(of)
    for at in range(2 * CONFIDENT):
        length = 5 + at % 12
        q.observe((length,), 1 + at % 3, core(1 + at % 3, length))
    assert of.costs.is_confident
    assert of.costs.seconds(16, 32) == pytest.approx(core(16, 32), rel=0.1)


def test_what_was_measured_at_load_is_scaled_to_a_slower_machine() -> None:
    of = mixed(measured(core))
    for _ in range(200):
        of.observe((8,), 4, 3 * core(4, 8))
    assert of.costs.seconds(1, 64) == pytest.approx(3 * core(1, 64), rel=0.15)


def test_a_single_delay_changes_little() -> None:
    of = mixed(measured(core))
    for _ in range(20):
        of.observe((8,), 4, core(4, 8))
    before = of.costs.seconds(4, 16)
    of.observe((8,), 4, 100 * core(4, 8))
    for _ in range(3):
        of.observe((8,), 4, core(4, 8))
    assert of.costs.seconds(4, 16) == pytest.approx(before, rel=0.2)


@dataclass
class ClosedLoop:
    """Clients that send their next request when they have the answer to the last, on one instance, in virtual time."""

    of: MixedLengths | None
    seconds: Seconds
    lengths: Callable[[random.Random], int]
    in_flight: int = 16
    answered: int = 0
    waits: list[float] = field(default_factory=list)

    def rate(self) -> float:
        chance, q, now = random.Random(0), queue(self.of), 0.0  # noqa: S311  (a simulation, the same each time)
        for _ in range(self.in_flight):
            offer(q, request(self.lengths(chance)), now)
        while self.answered < 2000:
            batch = take(q, now)
            took = self.seconds(batch.rows, max(lengths_in(batch)))
            now += took
            q.observe(batch.bucket, batch.rows, took)
            for one in batch.requests:
                self.waits.append(now - one.arrived_ns / 1e9)
                self.answered += 1
                offer(q, request(self.lengths(chance)), now)
        return self.answered / now


def short_texts(chance: random.Random) -> int:
    return chance.randint(5, 20)


def long_tail(chance: random.Random) -> int:
    return min(200, int(5 * chance.paretovariate(1.1)))


def two_lengths(chance: random.Random) -> int:
    return chance.choice((5, 200))


# On the device, lengths of 5 and 200 alone can be a tenth slower: a long text that leaves with the short ones would have
# shared a larger batch of long texts later.
MIXES = [
    (core, short_texts),
    (core, long_tail),
    (core, two_lengths),
    (device, short_texts),
    (device, long_tail),
]


@pytest.mark.parametrize("in_flight", [16, *(pytest.param(number, marks=pytest.mark.long) for number in (1, 64))])
@pytest.mark.parametrize(("seconds", "lengths"), MIXES)
def test_no_mix_of_lengths_is_slower_than_without_padding(
    in_flight: int, lengths: Callable[[random.Random], int], seconds: Seconds
) -> None:
    padded = ClosedLoop(mixed(measured(seconds)), seconds, lengths, in_flight)
    plain = ClosedLoop(None, seconds, lengths, in_flight)
    assert padded.rate() >= 0.98 * plain.rate()


@pytest.mark.parametrize(("seconds", "gain"), [(core, 1.05), (device, 3.0)])
def test_short_texts_gain_by_sharing_batches(seconds: Seconds, gain: float) -> None:
    padded, plain = (ClosedLoop(of, seconds, short_texts) for of in (mixed(measured(seconds)), None))
    assert padded.rate() >= gain * plain.rate()


def test_no_request_starves() -> None:
    loop = ClosedLoop(mixed(measured(core)), core, long_tail, in_flight=64)
    rate = loop.rate()
    assert max(loop.waits) <= 5 * 64 / rate
