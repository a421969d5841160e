from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.engine.batch_queue import Batch, BatchLimits, BatchQueue, FullError


@dataclass(eq=False)
class Request:
    rows: int = 1
    bucket: Hashable = "a"
    deadline: float | None = None
    priority: int = 0
    patience: float | None = None
    arrived: float = 0.0


def queue(**limits: object) -> BatchQueue[Request]:
    return BatchQueue(BatchLimits(**{"max_rows": 8, **limits}))  # type: ignore[arg-type]  # keyword by keyword in the tests


def take(q: BatchQueue[Request], now: float) -> Batch[Request]:
    batch = q.take(now)
    assert batch is not None
    return batch


def test_without_delay_what_is_there_goes_at_once() -> None:
    q, requests = queue(), [Request(rows=2), Request(rows=3)]
    for request in requests:
        q.offer(request, 1.0)
    assert take(q, 1.0).requests == requests
    assert q.take(1.0) is None
    assert q.next_due() is None


def test_a_request_that_no_longer_fits_starts_the_next_batch() -> None:
    q, requests = queue(), [Request(rows=5), Request(rows=4), Request(rows=4)]
    for request in requests:
        q.offer(request, 0.0)
    assert take(q, 0.0).requests == requests[:1]
    assert take(q, 0.0).requests == requests[1:]


def test_a_delay_holds_a_batch_back_until_it_is_due_or_full() -> None:
    q = queue(max_delay_s=0.5)
    first = Request(rows=6)
    q.offer(first, 10.0)
    assert q.take(10.4) is None
    assert q.next_due() == 10.5
    assert take(q, 10.5).requests == [first]
    q.offer(first, 20.0)
    q.offer(second := Request(rows=2), 20.1)
    assert take(q, 20.1).requests == [first, second]


def test_hurry_ends_all_waiting() -> None:
    q = queue(max_delay_s=3600.0, preferred_rows=(4,))
    q.offer(request := Request(), 0.0)
    assert q.take(0.0) is None
    hurried = q.take(0.0, hurry=True)
    assert hurried is not None
    assert hurried.requests == [request]
    assert q.take(0.0, hurry=True) is None


def test_a_preferred_size_ends_the_wait() -> None:
    q = queue(max_delay_s=1.0, preferred_rows=(4,))
    requests = [Request() for _ in range(5)]
    for request in requests[:3]:
        q.offer(request, 0.0)
    assert q.take(0.0) is None
    for request in requests[3:]:
        q.offer(request, 0.0)
    assert take(q, 0.0).requests == requests[:4]
    assert q.take(0.0) is None


def test_a_request_larger_than_the_preferred_size_is_not_stuck() -> None:
    q = queue(preferred_rows=(4,))
    q.offer(large := Request(rows=5), 0.0)
    assert take(q, 0.0).requests == [large]


def test_mixed_shapes_do_not_break_each_others_batches() -> None:
    q = queue()
    requests = [Request(bucket=b) for b in "abab"]
    for now, request in enumerate(requests):
        q.offer(request, float(now))
    assert take(q, 4.0).requests == requests[0::2]
    assert take(q, 4.0).requests == requests[1::2]


def test_expired_requests_are_handed_out_apart() -> None:
    q = queue()
    q.offer(late := Request(deadline=1.0), 0.0)
    q.offer(good := Request(deadline=3.0), 0.0)
    batch = take(q, 2.0)
    assert (batch.requests, batch.expired) == ([good], [late])


def test_an_expired_request_leaves_its_place_in_the_batch_to_others() -> None:
    q = queue(max_rows=2)
    q.offer(Request(rows=2, deadline=1.0), 0.0)
    q.offer(good := Request(rows=2), 0.0)
    assert take(q, 2.0).requests == [good]


def test_a_removed_request_frees_its_place() -> None:
    q = queue(max_waiting=2)
    first, second, third = Request(), Request(), Request()
    q.offer(first, 0.0)
    q.offer(second, 0.0)
    with pytest.raises(FullError):
        q.offer(third, 0.0)
    assert q.remove(first)
    assert not q.remove(first)
    q.offer(third, 0.0)
    assert take(q, 0.0).requests == [second, third]
    assert not q.remove(second)


def test_a_request_larger_than_any_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="9 rows do not fit a batch of at most 8"):
        queue().offer(Request(rows=9), 0.0)


LEVELS = 3


def test_the_more_urgent_go_first() -> None:
    q = queue(max_rows=2, levels=2)
    requests = [Request(priority=p, bucket=b) for p, b in ((1, "a"), (1, "b"), (0, "b"), (0, "b"))]
    for now, request in enumerate(requests):
        q.offer(request, float(now))
    taken = [take(q, 9.0).requests for _ in range(3)]
    assert taken == [[requests[2], requests[3]], [requests[0]], [requests[1]]]


def test_who_has_waited_too_long_stands_behind_the_others() -> None:
    q = queue(max_rows=1)
    q.offer(impatient := Request(patience=5.0), 0.0)
    q.offer(other := Request(), 6.0)
    assert [take(q, 7.0).requests for _ in range(2)] == [[other], [impatient]]


def test_a_priority_may_have_a_bound_of_its_own() -> None:
    q = queue(levels=2, max_waiting_by_level={1: 1})
    q.offer(Request(priority=1), 0.0)
    with pytest.raises(FullError, match="1 requests wait"):
        q.offer(Request(priority=1), 0.0)
    q.offer(Request(priority=0), 0.0)
    with pytest.raises(ValueError, match="priority 2 is none of 0 to 1"):
        q.offer(Request(priority=2), 0.0)


steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("offer"),
            st.builds(
                Request,
                rows=st.integers(1, 8),
                bucket=st.sampled_from("abc"),
                deadline=st.one_of(st.none(), st.floats(0, 50)),
                priority=st.integers(0, LEVELS - 1),
                patience=st.one_of(st.none(), st.floats(0, 50)),
            ),
        ),
        st.tuples(st.just("take"), st.floats(0, 2)),
        st.tuples(st.just("remove"), st.integers(0, 50)),
    ),
    max_size=60,
)


def level(request: Request, now: float) -> int:
    return LEVELS if request.patience is not None and request.patience <= now else request.priority


def checked(batch: Batch[Request], waiting: list[Request], now: float) -> list[Request]:
    """All that the batch took from those that waited, after checking that it might."""
    taken = [*batch.requests, *batch.expired]
    assert sum(r.rows for r in batch.requests) <= 8
    assert len({r.bucket for r in taken}) == 1
    assert all(r.deadline is None or r.deadline > now for r in batch.requests)
    assert all(r.deadline is not None and r.deadline <= now for r in batch.expired)
    assert all(any(r is w for w in waiting) for r in taken)
    lines = [[r for r in waiting if r.bucket == taken[0].bucket and level(r, now) == number] for number in range(LEVELS + 1)]
    for line in lines[:LEVELS]:  # those whose patience has ended stand in the order in which it was noticed
        from_line = sorted((r for r in taken if r in line), key=line.index)
        assert from_line == line[: len(from_line)], "order of arrival"
        assert [r for r in from_line if r in batch.requests] == [r for r in batch.requests if r in line]
    levels = [level(r, now) for r in batch.requests]
    assert levels == sorted(levels), "the more urgent first"
    least = max(level(r, now) for r in taken)
    assert all(r in taken for line in lines[:least] for r in line), "nobody is passed by"
    return taken


@given(steps, st.floats(0, 3), st.lists(st.integers(1, 10), max_size=3), st.integers(1, 12))
def test_nothing_is_lost_doubled_reordered_or_kept_too_long(
    steps: list[tuple[str, object]], delay: float, preferred: list[int], bound: int
) -> None:
    q = queue(max_delay_s=delay, preferred_rows=tuple(preferred), max_waiting=bound, levels=LEVELS)
    now = 0.0
    accepted: list[Request] = []
    gone: list[Request] = []

    for kind, value in steps:
        if isinstance(value, Request):
            value.arrived = now
            try:
                q.offer(value, now)
                accepted.append(value)
            except FullError:
                assert len(q) == bound
        elif kind == "take" and isinstance(value, float):
            now += value
            while (batch := q.take(now)) is not None:
                gone += checked(batch, [r for r in accepted if all(r is not g for g in gone)], now)
            left = [r for r in accepted if all(r is not g for g in gone)]
            assert all(now < r.arrived + delay for r in left), "waited past its bound"
            due = q.next_due()
            assert (due is None) == (not left)
            assert due is None or now < due <= now + delay
        elif isinstance(value, int) and value < len(accepted):
            expected = all(accepted[value] is not g for g in gone)
            assert q.remove(accepted[value]) is expected
            if expected:
                gone.append(accepted[value])
        assert len(q) == len(accepted) - len(gone)
