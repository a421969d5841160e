"""How far batches grow, by what a row costs in them."""

from collections.abc import Callable

import pytest

from halfserve.serve.engine.queueing.batch_queue import LONGEST_PAUSE, BatchGrowth

MS = 1e-3


def gpu(rows: int) -> float:
    return 2 * MS + rows * 0.01 * MS


def linear(rows: int) -> float:
    return rows * 5 * MS


def out_of_cache(rows: int) -> float:
    """Rows are cheapest in batches of 8, and a third dearer in one of 16."""
    return (1 + rows) * MS * (1.0 if rows < 16 else 1.33)


def tiny(rows: int) -> float:
    return (8 + 0.4 * rows) * 1e-6


def sizes(growth: BatchGrowth, seconds: Callable[[int], float], batches: int = 3000, waiting: int = 64) -> list[int]:
    """Rows of so many batches, one after the other, while `waiting` rows wait for each."""
    ran = []
    for _ in range(batches):
        rows = min(waiting, growth.most_rows("a"))
        growth.observe("a", rows, seconds(rows))
        ran.append(rows)
    return ran


def usual(ran: list[int]) -> int:
    last = ran[-500:]
    return max(set(last), key=last.count)


@pytest.mark.parametrize(("seconds", "expected"), [(gpu, 32), (tiny, 32), (linear, 1), (out_of_cache, 8)])
def test_batches_grow_as_long_as_rows_get_cheaper(seconds: Callable[[int], float], expected: int) -> None:
    assert usual(sizes(BatchGrowth(32), seconds)) == expected


def test_trials_become_rare_when_they_change_nothing() -> None:
    ran = sizes(BatchGrowth(32), gpu, batches=20 * LONGEST_PAUSE)
    assert sum(rows != 32 for rows in ran[-4 * LONGEST_PAUSE :]) <= 8 * 4


def test_a_trial_that_costs_much_ends_with_its_first_batch() -> None:
    ran = sizes(BatchGrowth(32), gpu, batches=17)
    assert ran == [32] * 16 + [16]
    growth = BatchGrowth(32)
    assert [rows for rows in sizes(growth, gpu, batches=40) if rows != 32] == [16]


def test_what_was_learned_is_unlearned_when_the_machine_changes() -> None:
    growth = BatchGrowth(32)
    sizes(growth, linear)
    assert usual(sizes(growth, gpu, batches=40 * LONGEST_PAUSE)) == 32


def test_fewer_waiting_rows_than_a_batch_may_have_are_looked_at_too() -> None:
    assert usual(sizes(BatchGrowth(32), out_of_cache, waiting=20)) == 8


def test_single_rows_say_nothing_about_larger_batches() -> None:
    growth = BatchGrowth(32)
    assert set(sizes(growth, linear, waiting=1)) == {1}
    assert growth.most_rows("a") == 32


def test_interrupted_batches_mislead_nobody() -> None:
    growth, count = BatchGrowth(32), 0

    def interrupted(rows: int) -> float:
        nonlocal count
        count += 1
        return gpu(rows) + (count % 3 == 0) * 0.5

    assert usual(sizes(growth, interrupted)) == 32


def test_the_largest_batch_need_be_no_power_of_two() -> None:
    assert usual(sizes(BatchGrowth(24), gpu)) == 24


def test_shapes_are_told_apart() -> None:
    growth = BatchGrowth(32)
    sizes(growth, linear)
    assert growth.most_rows("b") == 32
