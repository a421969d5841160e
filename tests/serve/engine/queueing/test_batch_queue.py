from __future__ import annotations

import pytest

from serve.engine.queueing.batch_queue import FullError
from tests.serve.engine.waiting import Request, offer, offer_all, queue, take


def test_without_delay_what_is_there_goes_at_once() -> None:
    q, requests = queue(), [Request(rows=2), Request(rows=3)]
    offer_all(q, requests, 1.0)
    batch = take(q, 1.0)
    assert (batch.requests, batch.rows, batch.bucket) == (requests, 5, "a")
    assert q.take(1.0) is None
    assert q.next_due(1.0) is None


def test_a_request_that_no_longer_fits_starts_the_next_batch() -> None:
    q, requests = queue(), [Request(rows=5), Request(rows=4), Request(rows=4)]
    offer_all(q, requests)
    assert take(q, 0.0).requests == requests[:1]
    assert take(q, 0.0).requests == requests[1:]


def test_a_delay_holds_a_batch_back_until_it_is_due_or_full() -> None:
    q = queue(max_delay_s=0.5)
    first = offer(q, Request(rows=6), 10.0)
    assert q.take(10.4) is None
    assert not q.is_ready(10.4)
    assert q.next_due(10.4) == 10.5
    assert q.is_ready(10.5)
    assert take(q, 10.5).requests == [first]
    offer(q, first, 20.0)
    second = offer(q, Request(rows=2), 20.1)
    assert take(q, 20.1).requests == [first, second]


def test_of_several_shapes_the_one_that_is_due_first_is_looked_at_first() -> None:
    q = queue(max_delay_s=0.5)
    offer(q, Request(bucket="a"), 10.0)
    offer(q, Request(bucket="b"), 10.25)
    assert q.next_due(10.3) == 10.5
    assert take(q, 10.5).bucket == "a"
    assert q.next_due(10.5) == 10.75


def test_a_batch_is_full_when_no_further_request_would_make_it_larger() -> None:
    q = queue(max_delay_s=1.0, preferred_rows=(4,))
    assert not q.has_full_batch(5.0)
    offer_all(q, [Request(rows=5), Request(bucket="b")])
    assert not q.has_full_batch(5.0), "not even one that is due, and of a preferred size"
    offer_all(q, [Request(rows=3)])
    assert q.has_full_batch(0.0)
    assert take(q, 0.0).rows == 8
    assert not q.has_full_batch(0.0)


def test_hurry_ends_all_waiting() -> None:
    q = queue(max_delay_s=3600.0, preferred_rows=(4,))
    request = offer(q, Request(), 0.0)
    assert q.take(0.0) is None
    hurried = q.take(0.0, hurry=True)
    assert hurried is not None
    assert hurried.requests == [request]
    assert q.take(0.0, hurry=True) is None


def test_a_preferred_size_ends_the_wait() -> None:
    q = queue(max_delay_s=1.0, preferred_rows=(4,))
    requests = [Request() for _ in range(5)]
    offer_all(q, requests[:3])
    assert q.take(0.0) is None
    offer_all(q, requests[3:])
    assert take(q, 0.0).requests == requests[:4]
    assert q.take(0.0) is None


def test_after_the_delay_a_batch_takes_all_it_can_hold() -> None:
    q = queue(max_delay_s=1.0, preferred_rows=(4,))
    requests = [Request() for _ in range(9)]
    offer_all(q, requests)
    assert take(q, 1.0).requests == requests[:8]


def test_without_a_delay_preferred_sizes_come_first_and_then_the_rest() -> None:
    q = queue(preferred_rows=(2, 4))
    offer_all(q, [Request() for _ in range(7)])
    assert [take(q, 100.0).rows for _ in range(3)] == [4, 2, 1]


def test_where_batches_are_padded_they_are_not_cut_to_a_preferred_size() -> None:
    q = queue(preferred_rows=(4, 8), padded_rows=(4, 8))
    offer_all(q, [Request() for _ in range(5)])
    assert take(q, 0.0).rows == 5


def test_a_request_larger_than_the_preferred_size_is_not_stuck() -> None:
    q = queue(preferred_rows=(4,))
    large = offer(q, Request(rows=5), 0.0)
    assert take(q, 0.0).requests == [large]


def test_mixed_shapes_do_not_break_each_others_batches() -> None:
    q = queue()
    requests = [Request(bucket=b) for b in "abab"]
    for now, request in enumerate(requests):
        offer(q, request, float(now))
    assert take(q, 4.0).requests == requests[0::2]
    assert take(q, 4.0).requests == requests[1::2]


def test_a_removed_request_frees_its_place() -> None:
    q = queue(max_waiting=2)
    first, second, third = Request(), Request(), Request()
    offer_all(q, [first, second])
    with pytest.raises(FullError, match="2 requests wait"):
        offer(q, third, 0.0)
    assert q.remove(first)
    assert not q.remove(first)
    offer(q, third, 0.0)
    assert take(q, 0.0).requests == [second, third]
    assert not q.remove(second)


def test_the_bytes_that_wait_are_bounded_too_and_one_request_is_always_taken() -> None:
    q = queue(max_waiting_bytes=10 * 2**20)
    huge, small = Request(size=50 * 2**20), Request(size=2**20)
    offer(q, huge, 0.0)
    with pytest.raises(FullError, match="requests of 50 MiB wait, of at most 10 MiB"):
        offer(q, small, 0.0)
    assert take(q, 0.0).requests == [huge]
    offer_all(q, requests := [Request(size=2**20) for _ in range(10)])
    with pytest.raises(FullError, match="requests of 10 MiB wait"):
        offer(q, small, 0.0)
    q.remove(requests[0])
    offer(q, small, 0.0)


def test_a_request_larger_than_any_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="9 rows do not fit a batch of at most 8"):
        queue().offer(Request(rows=9))


LEVELS = 3


def test_the_more_urgent_go_first() -> None:
    q = queue(max_rows=2, levels=2)
    requests = [Request(priority=p, bucket=b) for p, b in ((1, "a"), (1, "b"), (0, "b"), (0, "b"))]
    for now, request in enumerate(requests):
        offer(q, request, float(now))
    taken = [take(q, 9.0).requests for _ in range(3)]
    assert taken == [[requests[2], requests[3]], [requests[0]], [requests[1]]]


def test_who_has_waited_too_long_stands_behind_the_others_of_its_level() -> None:
    q = queue(max_rows=1, levels=2)
    lower = offer(q, Request(priority=1), 0.0)
    impatient = offer(q, Request(patience=5.0), 0.0)
    other = offer(q, Request(), 6.0)
    assert [take(q, 7.0).requests for _ in range(3)] == [[other], [impatient], [lower]]


def test_who_has_waited_too_long_stands_behind_those_of_other_shapes_too() -> None:
    q = queue(levels=2)
    lower = offer(q, Request(bucket="a", priority=1), 0.0)
    impatient = [offer(q, Request(bucket="b", patience=5.0), 1.0), offer(q, Request(bucket="b", patience=6.0), 2.0)]
    other, last = offer(q, Request(bucket="c"), 3.0), offer(q, Request(bucket="b"), 4.0)
    assert [take(q, 7.0).requests for _ in range(3)] == [[other], [last, *impatient], [lower]]


def test_a_priority_may_have_a_bound_of_its_own() -> None:
    q = queue(levels=2, max_waiting_by_level={1: 1})
    offer(q, Request(priority=1), 0.0)
    with pytest.raises(FullError, match="1 requests of priority 2 wait"):
        offer(q, Request(priority=1), 0.0)
    offer(q, Request(priority=0), 0.0)
    with pytest.raises(ValueError, match="priority 2 is none of 0 to 1"):
        offer(q, Request(priority=2), 0.0)
