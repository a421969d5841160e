from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serve.supervisor.backoff import FIRST_S, FORGET_AFTER_S, GIVE_UP_AFTER, LONGEST_S, Backoff

SERVED = st.one_of(st.none(), st.floats(0, 1e6))


def test_the_first_start_anew_is_at_once_and_the_next_ones_later_and_later() -> None:
    backoff = Backoff()
    assert [backoff.ended(1.0) for _ in range(10)] == [0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10]
    assert backoff.ended(FORGET_AFTER_S) == 0
    assert backoff.ended(1.0) == FIRST_S


def test_it_gives_up_after_five_that_never_got_ready() -> None:
    backoff = Backoff()
    for _ in range(GIVE_UP_AFTER - 1):
        backoff.ended(None)
    assert not backoff.gives_up
    backoff.ended(0.0)  # ready, if only just
    for _ in range(GIVE_UP_AFTER):
        assert not backoff.gives_up
        backoff.ended(None)
    assert backoff.gives_up


@given(st.lists(SERVED, max_size=40))
def test_waits_stay_in_their_bounds_and_only_a_minute_of_service_shortens_them(lives: list[float | None]) -> None:
    backoff, before = Backoff(), 0.0
    for served_s in lives:
        wait_s = backoff.ended(served_s)
        assert 0 <= wait_s <= LONGEST_S
        assert wait_s >= before or (served_s is not None and served_s >= FORGET_AFTER_S)
        before = wait_s
