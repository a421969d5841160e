"""Requests that have waited too long, or would have."""

from __future__ import annotations

import pytest

from serve.engine.queueing.latency_model import CONFIDENT
from serve.engine.queueing.pace import Pace
from tests.serve.engine.waiting import Request, offer, offer_all, queue, take


def test_late_requests_are_handed_out_apart() -> None:
    q = queue()
    late = offer(q, Request(deadline=1.0), 0.0)
    good = offer(q, Request(deadline=3.0), 0.0)
    batch = take(q, 2.0)
    assert (batch.requests, batch.late) == ([good], [late])


def test_a_late_request_leaves_its_place_in_the_batch_to_others() -> None:
    q = queue(max_rows=2)
    offer(q, Request(rows=2, deadline=1.0), 0.0)
    good = offer(q, Request(rows=2), 0.0)
    assert take(q, 2.0).requests == [good]


def test_all_late_requests_can_be_taken_out_to_make_room() -> None:
    q = queue(levels=2)
    requests = [Request(bucket=b, deadline=d, priority=p) for b, d, p in (("a", 9.0, 0), ("a", 1.0, 1), ("b", 2.0, 0))]
    offer_all(q, requests)
    assert q.take_late(0.5) == []
    assert q.take_late(2.0) == requests[1:]
    assert (len(q), q.waiting_before(1)) == (1, 1)
    assert take(q, 2.0).requests == requests[:1]


def test_a_request_that_would_miss_its_deadline_in_the_delay_does_not_wait() -> None:
    q = queue(max_delay_s=10.0)
    patient = offer(q, Request(deadline=11.0), 0.0)
    assert q.take(0.0) is None
    hasty = offer(q, Request(deadline=3.0), 1.0)
    assert take(q, 1.0).requests == [patient, hasty]
    offer(q, patient, 2.0)
    assert q.take(2.0) is not None, "11 s come before 12 s"


def test_a_request_is_late_once_it_has_waited_for_as_long_as_it_may_however_long_the_batch_takes() -> None:
    q = queue(levels=2)
    q.pace = Pace(q.limits)
    for _ in range(CONFIDENT):
        q.pace.observe("a", 2, 100.0)
    requests = [Request(leave_by=5.0), Request(leave_by=7.0), Request(leave_by=6.0, priority=1)]
    offer_all(q, requests)
    first = take(q, 4.0)
    assert (first.requests, first.late) == (requests, [])
    offer_all(q, requests)
    assert q.take_late(4.9) == []
    assert q.take_late(5.0) == requests[:1]
    batch = take(q, 6.0)
    assert (batch.requests, batch.late) == (requests[1:2], requests[2:])


def test_a_request_that_leaves_in_time_for_a_batch_that_begins_later_is_late_by_its_deadline_alone() -> None:
    q = queue()
    requests = [Request(leave_by=2.0), Request(deadline=2.0), Request(deadline=4.0)]
    offer_all(q, requests)
    batch = q.take(1.0, begins=3.0)
    assert batch is not None
    assert (batch.requests, batch.late) == ([requests[0], requests[2]], [requests[1]])


@pytest.mark.parametrize("paced", [False, True])
def test_a_request_that_would_have_to_leave_within_the_delay_does_not_wait(paced: bool) -> None:
    q = queue(max_delay_s=10.0)
    q.pace = Pace(q.limits) if paced else None
    offer(q, Request(leave_by=11.0), 0.0)
    assert (q.take(0.0), q.next_due(0.0)) == (None, 10.0)
    offer(q, Request(leave_by=9.0), 1.0)
    assert take(q, 1.0).rows == 2
