"""Whatever comes and goes in whatever order, the queue keeps its promises."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from serve.engine.queueing.batch_queue import Batch, FullError
from tests.serve.engine.waiting import Request, offer, offer_all, queue

LEVELS = 3

# Times are whole milliseconds, so that sums of them are what they seem.
ms = st.integers(0, 50).map(lambda n: n / 1000)
steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("offer"),
            st.builds(
                Request,
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


def place(request: Request, now: float) -> int:
    """Which line it stands in: two per priority."""
    return 2 * request.priority + (request.patience is not None and request.patience <= now)


def is_late(request: Request, now: float) -> bool:
    return any(bound is not None and bound <= now for bound in (request.deadline, request.leave_by))


def checked(batch: Batch[Request], waiting: list[Request], now: float) -> list[Request]:
    """All that the batch took from those that waited, after checking that it might."""
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
    accepted: list[Request] = []
    gone: list[Request] = []

    for kind, value in steps:
        if isinstance(value, Request):
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
            assert all(now < r.arrived + delay for r in left), "waited past its bound"
            due = q.next_due(now)
            assert (due is None) == (not left)
            assert due is None or now < due <= now + delay
        elif kind == "make room" and isinstance(value, float):
            now = round(now + value, 3)
            late = q.take_late(now)
            left = [r for r in accepted if all(r is not g for g in gone)]
            assert sorted(map(id, late)) == sorted(id(r) for r in left if is_late(r, now))
            gone += late
        elif isinstance(value, int) and value < len(accepted):
            expected = all(accepted[value] is not g for g in gone)
            assert q.remove(accepted[value]) is expected
            if expected:
                gone.append(accepted[value])
        assert len(q) == len(accepted) - len(gone) == q.waiting_before(LEVELS - 1)
        assert sum(line.rows for line in q.lines()) == sum(r.rows for r in accepted if all(r is not g for g in gone))


@settings(max_examples=30)
@given(st.permutations(range(200)), st.integers(0, 200))
def test_those_who_leave_the_middle_of_a_line_hold_nothing_up(order: list[int], leaving: int) -> None:
    q, requests = queue(max_rows=200), [Request() for _ in range(200)]
    offer_all(q, requests)
    for number in order[:leaving]:
        assert q.remove(requests[number])
    left = [requests[n] for n in sorted(order[leaving:])]
    assert [r for line in q.lines() for r in line] == left
    batch = q.take(0.0)
    assert (batch.requests if batch else []) == left
