"""Which waiting requests run together, and when."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfserve.serve.engine.queueing.batch_queue import Batch
from halfserve.serve.engine.queueing.pace import CONFIDENT, Pace
from halfserve.serve.engine.queueing.waiting_requests import FullError
from halfserve.serve.engine.requests import InferRequest
from tests.serve.engine.simulation import new_request, offer, offer_all, queue, take


def test_without_delay_waiting_requests_go_at_once() -> None:
    q, requests = queue(), [new_request(rows=2), new_request(rows=3)]
    offer_all(q, requests, 1.0)
    batch = take(q, 1.0)
    assert (batch.requests, batch.rows, batch.bucket) == (requests, 5, "a")
    assert q.take(1.0) is None
    assert q.next_due(1.0) is None


def test_a_request_that_no_longer_fits_starts_the_next_batch() -> None:
    q, requests = queue(), [new_request(rows=5), new_request(rows=4), new_request(rows=4)]
    offer_all(q, requests)
    assert take(q, 0.0).requests == requests[:1]
    assert take(q, 0.0).requests == requests[1:]


def test_a_delay_holds_a_batch_back_until_it_is_due_or_full() -> None:
    q = queue(max_delay_s=0.5)
    first = offer(q, new_request(rows=6), 10.0)
    assert q.take(10.4) is None
    assert not q.is_ready(10.4)
    assert q.next_due(10.4) == 10.5
    assert q.is_ready(10.5)
    assert take(q, 10.5).requests == [first]
    offer(q, first, 20.0)
    second = offer(q, new_request(rows=2), 20.1)
    assert take(q, 20.1).requests == [first, second]


def test_a_request_of_another_shape_ends_the_delay_of_what_waits() -> None:
    q = queue(max_delay_s=0.5)
    first = [new_request(bucket="a"), new_request(bucket="a")]
    offer_all(q, first, 10.0)
    offer(q, new_request(bucket="b"), 10.25)
    assert q.next_due(10.25) == 10.0
    assert take(q, 10.25).requests == first
    assert q.take(10.25) is None
    assert q.next_due(10.25) == 10.75
    offer(q, new_request(bucket="a"), 10.3)
    assert take(q, 10.3).bucket == "b"
    assert q.next_due(10.3) == 10.8, "the delay begins again with the next request"


def test_a_batch_is_full_when_no_further_request_would_make_it_larger() -> None:
    q = queue(max_delay_s=1.0, preferred_rows=(4,))
    assert not q.has_full_batch(5.0)
    offer_all(q, [new_request(rows=5), new_request(bucket="b")])
    assert not q.has_full_batch(5.0), "not even one that is due, and of a preferred size"
    offer_all(q, [new_request(rows=3)])
    assert q.has_full_batch(0.0)
    assert take(q, 0.0).rows == 8
    assert not q.has_full_batch(0.0)


def test_hurry_ends_all_waiting() -> None:
    q = queue(max_delay_s=3600.0, preferred_rows=(4,))
    request = offer(q, new_request(), 0.0)
    assert q.take(0.0) is None
    hurried = q.take(0.0, hurry=True)
    assert hurried is not None
    assert hurried.requests == [request]
    assert q.take(0.0, hurry=True) is None


def test_a_preferred_size_ends_the_wait() -> None:
    q = queue(max_delay_s=1.0, preferred_rows=(4,))
    requests = [new_request() for _ in range(5)]
    offer_all(q, requests[:3])
    assert q.take(0.0) is None
    offer_all(q, requests[3:])
    assert take(q, 0.0).requests == requests[:4]
    assert q.take(0.0) is None


def test_after_the_delay_a_batch_takes_all_it_can_hold() -> None:
    q = queue(max_delay_s=1.0, preferred_rows=(4,))
    requests = [new_request() for _ in range(9)]
    offer_all(q, requests)
    assert take(q, 1.0).requests == requests[:8]


def test_without_a_delay_preferred_sizes_come_first_and_then_the_rest() -> None:
    q = queue(preferred_rows=(2, 4))
    offer_all(q, [new_request() for _ in range(7)])
    assert [take(q, 100.0).rows for _ in range(3)] == [4, 2, 1]


def test_where_batches_are_padded_they_are_not_cut_to_a_preferred_size() -> None:
    q = queue(preferred_rows=(4, 8), padded_rows=(4, 8))
    offer_all(q, [new_request() for _ in range(5)])
    assert take(q, 0.0).rows == 5


def test_a_request_larger_than_the_preferred_size_is_not_stuck() -> None:
    q = queue(preferred_rows=(4,))
    large = offer(q, new_request(rows=5), 0.0)
    assert take(q, 0.0).requests == [large]


def test_batches_whose_rows_get_no_cheaper_stop_growing_unless_sizes_are_preferred() -> None:
    learns, told = queue(), queue(preferred_rows=(8,))
    for q in (learns, told):
        for _ in range(500):
            offer_all(q, [new_request() for _ in range(8)])
            while (batch := q.take(0.0)) is not None:
                q.observe("a", batch.rows, 0.001 * batch.rows)
    offer_all(learns, [new_request() for _ in range(8)])
    offer_all(told, [new_request() for _ in range(8)])
    assert learns.has_full_batch(0.0)
    assert take(learns, 0.0).rows < 8
    assert take(told, 0.0).rows == 8


def test_mixed_shapes_do_not_break_each_others_batches() -> None:
    q = queue()
    requests = [new_request(bucket=b) for b in "abab"]
    for now, request in enumerate(requests):
        offer(q, request, float(now))
    assert take(q, 4.0).requests == requests[0::2]
    assert take(q, 4.0).requests == requests[1::2]


def test_a_removed_request_frees_its_place() -> None:
    q = queue(max_waiting=2)
    first, second, third = new_request(), new_request(), new_request()
    offer_all(q, [first, second])
    with pytest.raises(FullError, match="2 requests wait"):
        offer(q, third, 0.0)
    assert q.waiting.remove(first)
    assert not q.waiting.remove(first)
    offer(q, third, 0.0)
    assert take(q, 0.0).requests == [second, third]
    assert not q.waiting.remove(second)


def test_waiting_bytes_are_bounded_but_for_a_single_request() -> None:
    q = queue(max_waiting_bytes=10 * 2**20)
    huge, small = new_request(size=50 * 2**20), new_request(size=2**20)
    offer(q, huge, 0.0)
    with pytest.raises(FullError, match="requests of 50 MiB wait, of at most 10 MiB"):
        offer(q, small, 0.0)
    assert take(q, 0.0).requests == [huge]
    offer_all(q, requests := [new_request(size=2**20) for _ in range(10)])
    with pytest.raises(FullError, match="requests of 10 MiB wait"):
        offer(q, small, 0.0)
    q.waiting.remove(requests[0])
    offer(q, small, 0.0)


def test_a_request_larger_than_any_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="9 rows do not fit a batch of at most 8"):
        queue().offer(new_request(rows=9))


LEVELS = 3


def test_the_more_urgent_go_first() -> None:
    q = queue(max_rows=2, levels=2)
    requests = [new_request(priority=p, bucket=b) for p, b in ((1, "a"), (1, "b"), (0, "b"), (0, "b"))]
    for now, request in enumerate(requests):
        offer(q, request, float(now))
    taken = [take(q, 9.0).requests for _ in range(3)]
    assert taken == [[requests[2], requests[3]], [requests[0]], [requests[1]]]


def test_requests_past_their_patience_go_behind_their_level() -> None:
    q = queue(max_rows=1, levels=2)
    lower = offer(q, new_request(priority=1), 0.0)
    impatient = offer(q, new_request(patience=5.0), 0.0)
    other = offer(q, new_request(), 6.0)
    assert [take(q, 7.0).requests for _ in range(3)] == [[other], [impatient], [lower]]


def test_requests_past_their_patience_go_behind_other_shapes_too() -> None:
    q = queue(levels=2)
    lower = offer(q, new_request(bucket="a", priority=1), 0.0)
    impatient = [offer(q, new_request(bucket="b", patience=5.0), 1.0), offer(q, new_request(bucket="b", patience=6.0), 2.0)]
    other, last = offer(q, new_request(bucket="c"), 3.0), offer(q, new_request(bucket="b"), 4.0)
    assert [take(q, 7.0).requests for _ in range(3)] == [[other], [last, *impatient], [lower]]


def test_any_number_of_priorities_is_kept_apart() -> None:
    q = queue(max_rows=1, levels=2**64 - 1, max_waiting_of_others=2)
    levels = [2**32, 2**64 - 2, *range(1000, 0, -7), 0]
    for _ in range(2):
        for level in levels:
            offer(q, new_request(priority=level), 0.0)
        offer(q, new_request(priority=2**32), 0.0)
        with pytest.raises(FullError, match="2 requests of priority 4294967297 wait"):
            offer(q, new_request(priority=2**32), 0.0)
        assert q.waiting.count_before(1000) == len(levels) - 2
        taken = [take(q, 1.0).requests[0].priority for _ in range(len(q))]
        assert taken == sorted([*levels, 2**32])


def test_a_priority_may_have_a_bound_of_its_own() -> None:
    q = queue(levels=2, max_waiting_by_level={1: 1})
    offer(q, new_request(priority=1), 0.0)
    with pytest.raises(FullError, match="1 requests of priority 2 wait"):
        offer(q, new_request(priority=1), 0.0)
    offer(q, new_request(priority=0), 0.0)
    with pytest.raises(ValueError, match="priority 2 is none of 0 to 1"):
        offer(q, new_request(priority=2), 0.0)


def test_late_requests_are_handed_out_apart() -> None:
    q = queue()
    late = offer(q, new_request(deadline=1.0), 0.0)
    good = offer(q, new_request(deadline=3.0), 0.0)
    batch = take(q, 2.0)
    assert (batch.requests, batch.late) == ([good], [late])


def test_a_late_request_leaves_its_place_in_the_batch_to_others() -> None:
    q = queue(max_rows=2)
    offer(q, new_request(rows=2, deadline=1.0), 0.0)
    good = offer(q, new_request(rows=2), 0.0)
    assert take(q, 2.0).requests == [good]


def test_all_late_requests_can_be_taken_out_to_make_room() -> None:
    q = queue(levels=2)
    requests = [new_request(bucket=b, deadline=d, priority=p) for b, d, p in (("a", 9.0, 0), ("a", 1.0, 1), ("b", 2.0, 0))]
    offer_all(q, requests)
    assert q.waiting.take_late(0.5) == []
    assert q.waiting.take_late(2.0) == requests[1:]
    assert (len(q), q.waiting.count_before(1)) == (1, 1)
    assert take(q, 2.0).requests == requests[:1]


def test_a_request_that_would_miss_its_deadline_in_the_delay_does_not_wait() -> None:
    q = queue(max_delay_s=10.0)
    patient = offer(q, new_request(deadline=11.0), 0.0)
    assert q.take(0.0) is None
    hasty = offer(q, new_request(deadline=3.0), 1.0)
    assert take(q, 1.0).requests == [patient, hasty]
    offer(q, patient, 2.0)
    assert q.take(2.0) is not None, "11 s come before 12 s"


def test_a_request_past_its_queue_timeout_is_late_whatever_the_batch_time() -> None:
    q = queue(levels=2)
    q.pace = Pace(q.limits)
    for _ in range(CONFIDENT):
        q.pace.observe("a", 2, 100.0)
    requests = [new_request(leave_by=5.0), new_request(leave_by=7.0), new_request(leave_by=6.0, priority=1)]
    offer_all(q, requests)
    first = take(q, 4.0)
    assert (first.requests, first.late) == (requests, [])
    offer_all(q, requests)
    assert q.waiting.take_late(4.9) == []
    assert q.waiting.take_late(5.0) == requests[:1]
    batch = take(q, 6.0)
    assert (batch.requests, batch.late) == (requests[1:2], requests[2:])


def test_in_a_batch_that_begins_later_only_deadlines_make_late() -> None:
    q = queue()
    requests = [new_request(leave_by=2.0), new_request(deadline=2.0), new_request(deadline=4.0)]
    offer_all(q, requests)
    batch = q.take(1.0, begins=3.0)
    assert batch is not None
    assert (batch.requests, batch.late) == ([requests[0], requests[2]], [requests[1]])


@pytest.mark.parametrize("paced", [False, True])
def test_a_request_that_would_have_to_leave_within_the_delay_does_not_wait(paced: bool) -> None:
    q = queue(max_delay_s=10.0)
    q.pace = Pace(q.limits) if paced else None
    offer(q, new_request(leave_by=11.0), 0.0)
    assert (q.take(0.0), q.next_due(0.0)) == (None, 10.0)
    offer(q, new_request(leave_by=9.0), 1.0)
    assert take(q, 1.0).rows == 2


# Times are whole milliseconds, so that sums of them are what they seem.
ms = st.integers(0, 50).map(lambda n: n / 1000)


steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("offer"),
            st.builds(
                new_request,
                rows=st.integers(1, 8),
                bucket=st.sampled_from("abc"),
                deadline=st.one_of(st.none(), ms),
                priority=st.integers(0, LEVELS - 1),
                patience=st.one_of(st.none(), ms),
                leave_by=st.one_of(st.none(), ms),
                size=st.integers(0, 5),
            ),
        ),
        st.tuples(st.sampled_from(["take", "make room"]), ms),
        st.tuples(st.just("remove"), st.integers(0, 50)),
    ),
    max_size=60,
)


def place(request: InferRequest, now: float) -> int:
    """Which line it stands in: two per priority."""
    return 2 * request.priority + (request.patience is not None and request.patience <= now)


def is_late(request: InferRequest, now: float) -> bool:
    return any(bound is not None and bound <= now for bound in (request.deadline, request.leave_by))


def checked(batch: Batch, waiting: list[InferRequest], now: float) -> list[InferRequest]:
    """The requests that the batch took, after checking its choice."""
    taken = [*batch.requests, *batch.late]
    assert sum(r.rows for r in batch.requests) == batch.rows <= 8
    assert {r.bucket for r in taken} == {batch.bucket}
    assert not any(is_late(r, now) for r in batch.requests)
    assert all(is_late(r, now) for r in batch.late)
    assert all(any(r is w for w in waiting) for r in taken)
    lines = [[r for r in waiting if r.bucket == batch.bucket and place(r, now) == number] for number in range(2 * LEVELS)]
    for line in lines[::2]:  # those whose patience has ended stand in the order in which it was noticed
        from_line = sorted((r for r in taken if r in line), key=line.index)
        assert from_line == line[: len(from_line)], "order of arrival"
        assert [r for r in from_line if r in batch.requests] == [r for r in batch.requests if r in line]
    places = [place(r, now) for r in batch.requests]
    assert places == sorted(places), "the more urgent first"
    least = max(place(r, now) for r in taken)
    assert all(r in taken for line in lines[:least] for r in line), "nobody is passed by"
    return taken


@given(steps, ms, st.lists(st.integers(1, 10), max_size=3), st.integers(1, 12), st.integers(1, 30))
def test_nothing_is_lost_doubled_reordered_or_kept_too_long(
    steps: list[tuple[str, object]], delay: float, preferred: list[int], bound: int, most: int
) -> None:
    q = queue(max_delay_s=delay, preferred_rows=tuple(preferred), max_waiting=bound, max_waiting_bytes=most, levels=LEVELS)
    now = 0.0
    accepted: list[InferRequest] = []
    gone: list[InferRequest] = []

    for kind, value in steps:
        if isinstance(value, InferRequest):
            try:
                accepted.append(offer(q, value, now))
            except FullError:
                held = sum(r.size for r in accepted if all(r is not g for g in gone))
                assert len(q) == bound or (len(q) and held + value.size > most)
        elif kind == "take" and isinstance(value, float):
            now = round(now + value, 3)
            while (batch := q.take(now)) is not None:
                gone += checked(batch, [r for r in accepted if all(r is not g for g in gone)], now)
            left = [r for r in accepted if all(r is not g for g in gone)]
            assert all(now < r.arrived_ns / 1e9 + delay for r in left), "waited past its bound"
            due = q.next_due(now)
            assert (due is None) == (not left)
            assert due is None or now < due <= now + delay
        elif kind == "make room" and isinstance(value, float):
            now = round(now + value, 3)
            late = q.waiting.take_late(now)
            left = [r for r in accepted if all(r is not g for g in gone)]
            assert sorted(map(id, late)) == sorted(id(r) for r in left if is_late(r, now))
            gone += late
        elif isinstance(value, int) and value < len(accepted):
            expected = all(accepted[value] is not g for g in gone)
            assert q.waiting.remove(accepted[value]) is expected
            if expected:
                gone.append(accepted[value])
        assert len(q) == len(accepted) - len(gone) == q.waiting.count_before(LEVELS - 1)
        assert sum(line.rows for line in q.waiting.filled()) == sum(r.rows for r in accepted if all(r is not g for g in gone))


@settings(max_examples=30)
@given(st.permutations(range(200)), st.integers(0, 200))
def test_requests_removed_from_the_middle_of_a_line_block_nothing(order: list[int], leaving: int) -> None:
    q, requests = queue(max_rows=200), [new_request() for _ in range(200)]
    offer_all(q, requests)
    for number in order[:leaving]:
        assert q.waiting.remove(requests[number])
    left = [requests[n] for n in sorted(order[leaving:])]
    assert [r for line in q.waiting.filled() for r in line] == left
    batch = q.take(0.0)
    assert (batch.requests if batch else []) == left
