from __future__ import annotations

import pytest

from serve.engine.instances.short_batches import AFTER_STALL, FIRST, MAX_SIZES, SHORT_S, STALL_S, STANDSTILL_S, ShortBatches

SHORT, LONG = SHORT_S / 2, SHORT_S * 2


def learned(seconds: float = SHORT, rows: int = 4, batches: int = FIRST) -> ShortBatches:
    short = ShortBatches()
    for _ in range(batches):
        short.ran_on_thread("a", rows, seconds)
    return short


def test_the_first_batches_run_on_a_thread() -> None:
    assert not ShortBatches().suits("a", 4)
    assert not learned(batches=FIRST - 1).suits("a", 4)
    assert learned().suits("a", 4)


def test_what_is_known_from_the_start_holds_for_every_size_up_to_it() -> None:
    short = ShortBatches({2: SHORT, 8: SHORT_S, 16: LONG})
    assert [short.suits("a", rows) for rows in (1, 2, 5, 8, 16, 17)] == [True, True, True, True, False, False]
    for _ in range(20):
        short.ran_on_loop("a", 5, LONG, LONG)
    assert not short.suits("a", 5), "what is seen later counts for more"


def test_what_was_learned_holds_for_one_shape_and_about_one_size() -> None:
    short = learned()
    assert (short.suits("a", 7), short.suits("a", 8), short.suits("b", 4)) == (True, False, False)


def test_long_batches_stay_on_the_thread() -> None:
    short = learned(LONG, batches=1000)
    assert not short.suits("a", 4)


def test_on_the_thread_the_shortest_counts() -> None:
    short = learned(10 * LONG)
    short.ran_on_thread("a", 4, SHORT)  # the others waited for Python's lock
    assert short.suits("a", 4)
    for _ in range(20):
        short.ran_on_thread("a", 4, 10 * LONG)
    assert not short.suits("a", 4), "but not for ever"


def test_batches_that_become_longer_go_back_to_the_thread() -> None:
    short = learned()
    for _ in range(20):
        short.ran_on_loop("a", 4, LONG, LONG)
    assert not short.suits("a", 4)


def test_time_that_other_programs_had_the_core_does_not_count() -> None:
    short = learned()
    for _ in range(20):
        short.ran_on_loop("a", 4, SHORT, STANDSTILL_S)
    assert short.suits("a", 4)


@pytest.mark.parametrize(("spent_s", "clock_s"), [(2 * STALL_S, 2 * STALL_S), (SHORT, 2 * STANDSTILL_S)])
def test_a_stall_of_the_loop_is_not_soon_repeated(spent_s: float, clock_s: float) -> None:
    short = learned()
    short.ran_on_loop("a", 4, spent_s, clock_s)
    for _ in range(AFTER_STALL - 1):
        short.ran_on_thread("a", 4, SHORT)
        assert not short.suits("a", 4)
    short.ran_on_thread("a", 4, SHORT)
    assert short.suits("a", 4)


def test_endless_shapes_cost_no_more() -> None:
    short = ShortBatches()
    for number in range(3 * MAX_SIZES):
        short.ran_on_thread(number, 1, SHORT)
    assert len(short._sizes) <= MAX_SIZES
