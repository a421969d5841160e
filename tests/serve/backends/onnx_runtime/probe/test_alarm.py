from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from serve.backends.onnx_runtime.probe.alarm import Alarm

LONG_S, SOON_S, PATIENCE_S = 600.0, 0.01, 30.0


class Bell:
    """Counts how often it is rung."""

    def __init__(self) -> None:
        self.alarm = Alarm(self.ring)
        self._rung = threading.Semaphore(0)

    def ring(self) -> None:
        self._rung.release()

    def rang(self) -> bool:
        return self._rung.acquire(timeout=PATIENCE_S)

    @property
    def is_silent(self) -> bool:
        return not self._rung.acquire(blocking=False)


@pytest.fixture
def bell() -> Iterator[Bell]:
    made = Bell()
    yield made
    made.alarm.stop()


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "alarm"}


def test_it_rings_once_for_each_time(bell: Bell) -> None:
    for _ in range(3):
        bell.alarm.set(SOON_S)
        assert bell.rang()
    assert bell.is_silent


def test_an_earlier_time_takes_the_place_of_a_later_one(bell: Bell) -> None:
    bell.alarm.set(LONG_S)
    bell.alarm.set(SOON_S)
    assert bell.rang()
    assert bell.is_silent


def test_a_later_time_takes_the_place_of_an_earlier_one() -> None:
    early, late = Bell(), Bell()
    early.alarm.set(5 * SOON_S)
    early.alarm.set(LONG_S)
    late.alarm.set(10 * SOON_S)
    assert late.rang()
    assert early.is_silent
    early.alarm.stop()


def test_putting_it_off_keeps_one_thread_and_stopping_ends_it() -> None:
    before = threads()
    bell = Bell()
    for _ in range(100):
        bell.alarm.set(LONG_S)
        bell.alarm.off()
    (thread,) = threads() - before
    bell.alarm.stop()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert bell.is_silent


def test_it_can_be_set_after_it_was_stopped(bell: Bell) -> None:
    bell.alarm.set(LONG_S)
    bell.alarm.stop()
    bell.alarm.set(SOON_S)
    assert bell.rang()


def test_it_can_be_set_while_it_rings() -> None:
    rung = threading.Semaphore(0)
    times = iter([SOON_S, SOON_S])

    def again() -> None:
        for in_s in times:
            alarm.set(in_s)
            break
        rung.release()

    alarm = Alarm(again)
    alarm.set(SOON_S)
    assert all(rung.acquire(timeout=PATIENCE_S) for _ in range(3))
    alarm.stop()


def test_no_thread_is_left_when_there_is_nothing_to_wait_for() -> None:
    before = threads()
    bell = Bell()
    bell.alarm.set(SOON_S)
    assert bell.rang()
    for thread in threads() - before:
        thread.join(PATIENCE_S)
    assert threads() <= before
