from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from serve.benchmark.load.arrivals import ClosedLoop, OpenLoop, intended_times, pacer_of
from serve.benchmark.load.order import Arrivals, Order

SECOND = 1_000_000_000


def times(arrivals: Arrivals, rate: float, seconds: float, share: tuple[int, int] = (0, 1)) -> list[int]:
    return list(intended_times(Order(rate=rate, arrivals=arrivals, seconds=seconds, share=share), 0))


@given(st.integers(1, 5), st.integers(1, 2000), st.floats(0.05, 1))
def test_even_arrivals_of_all_processes_together_are_evenly_spaced(processes: int, rate: int, seconds: float) -> None:
    together = sorted(t for index in range(processes) for t in times("constant", rate, seconds, (index, processes)))
    assert abs(len(together) - rate * seconds) <= 1
    assert all(abs(late - early - SECOND / rate) <= 1 for early, late in pairwise(together))


def test_random_arrivals_are_a_poisson_process_of_the_rate() -> None:
    together = sorted(t for index in range(3) for t in times("poisson", 20_000, 1.0, (index, 3)))
    assert abs(len(together) - 20_000) < 5 * math.sqrt(20_000)
    gaps = np.diff(together)
    # Exponential gaps: the deviation equals the mean, and e^-1 of them are longer than it.
    assert 0.95 < gaps.std() / gaps.mean() < 1.05
    assert abs((gaps > gaps.mean()).mean() - math.exp(-1)) < 0.02


def test_random_arrivals_are_the_same_in_every_run_and_others_in_every_process() -> None:
    assert times("poisson", 100, 1) == times("poisson", 100, 1)
    assert times("poisson", 100, 1, (0, 2)) != times("poisson", 100, 1, (1, 2))


def test_a_number_of_requests_ends_them() -> None:
    order = Order(rate=10, requests=3, arrivals="constant")
    assert list(intended_times(order, 7)) == [7, 7 + SECOND // 10, 7 + SECOND // 5]


def test_an_open_loop_gives_what_is_due_whatever_is_answered() -> None:
    pacer = OpenLoop(Order(rate=10, requests=3, arrivals="constant"), 0)
    assert (pacer.due(0), pacer.next_ns()) == ([0], SECOND // 10)
    assert pacer.due(SECOND) == [SECOND // 10, SECOND // 5]
    pacer.answered(1)
    assert pacer.exhausted
    assert pacer.due(2 * SECOND) == []


def test_an_open_loop_lasts_until_its_end() -> None:
    pacer = pacer_of(Order(rate=2, seconds=1.0, arrivals="constant"), 0)
    assert pacer.due(SECOND // 2) == [0, SECOND // 2]
    assert (pacer.exhausted, pacer.next_ns()) == (False, SECOND)
    assert pacer.due(SECOND) == []
    assert (pacer.exhausted, pacer.next_ns()) == (True, None)
    told = pacer_of(Order(rate=2, seconds=1.0), 0)
    told.stop()
    assert (told.exhausted, told.due(SECOND)) == (True, [])


@given(st.integers(1, 20), st.lists(st.integers(0, 20), max_size=10), st.integers(0, 60))
def test_a_closed_loop_keeps_so_many_in_flight_and_no_more(concurrency: int, answers: list[int], requests: int) -> None:
    pacer = ClosedLoop(Order(concurrency=concurrency, requests=requests), 0)
    in_flight = sent = 0
    for count in [0, *answers]:
        for _ in range(min(count, in_flight)):
            pacer.answered(1)
            in_flight -= 1
        due = len(pacer.due(0))
        in_flight, sent = in_flight + due, sent + due
        assert in_flight == min(concurrency, in_flight + requests - sent)
        assert pacer.exhausted == (sent == requests)


def test_a_closed_loop_ends_in_time_and_when_it_is_told() -> None:
    pacer = pacer_of(Order(concurrency=2, seconds=1.0), 0)
    assert (pacer.due(5), pacer.next_ns()) == ([5, 5], SECOND)
    pacer.answered(1)
    assert pacer.due(SECOND) == []
    assert (pacer.exhausted, pacer.next_ns()) == (True, None)
    told = pacer_of(Order(concurrency=2), 0)
    told.stop()
    assert told.due(0) == []
