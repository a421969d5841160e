from __future__ import annotations

import threading
import time

import pytest

from serve.engine.pauses import PAUSE_S, pause, pausing


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[threading.Thread, float]]:
    """Who has rested for how long."""
    seen: list[tuple[threading.Thread, float]] = []
    monkeypatch.setattr(time, "sleep", lambda seconds: seen.append((threading.current_thread(), seconds)))
    return seen


def test_work_rests_only_where_it_is_told_to(rests: list[tuple[threading.Thread, float]]) -> None:
    pause()
    assert rests == []
    with pausing():
        pause()
        with pausing(pauses=False):
            pause()
        pause()
    pause()
    assert [seconds for _, seconds in rests] == [PAUSE_S, PAUSE_S]


def test_it_ends_with_what_went_wrong_within(rests: list[tuple[threading.Thread, float]]) -> None:
    with pytest.raises(KeyError), pausing():
        raise KeyError
    pause()
    assert rests == []


def test_other_threads_do_not_rest(rests: list[tuple[threading.Thread, float]]) -> None:
    with pausing():
        thread = threading.Thread(target=pause)
        thread.start()
        thread.join()
        pause()
    assert [who for who, _ in rests] == [threading.current_thread()]
