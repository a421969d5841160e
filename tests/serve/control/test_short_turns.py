from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator

import pytest

from serve.control.loader_thread import LoaderThread
from serve.control.short_turns import TURN_S, ShortTurns

LONG_S, SHORTER_S = 0.004, 0.00002


@pytest.fixture
def long_turns() -> Iterator[None]:
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(LONG_S)
    yield
    sys.setswitchinterval(before_s)


def turn_s() -> float:
    return round(sys.getswitchinterval(), 5)  # it is kept in whole microseconds, rounded down


@pytest.mark.usefixtures("long_turns")
def test_turns_stay_short_until_the_last_one_has_left() -> None:
    turns = ShortTurns()
    with turns.during():
        with turns.during():
            assert turn_s() == TURN_S
        assert turn_s() == TURN_S
    assert turn_s() == LONG_S
    with turns.during():
        assert turn_s() == TURN_S
    assert turn_s() == LONG_S


@pytest.mark.usefixtures("long_turns")
def test_what_is_shorter_already_is_left_alone() -> None:
    sys.setswitchinterval(SHORTER_S)
    with ShortTurns().during():
        assert turn_s() == SHORTER_S
    assert turn_s() == SHORTER_S


@pytest.mark.usefixtures("long_turns")
def test_the_loader_thread_takes_short_turns_and_gives_them_up_when_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.control.loader_thread.SHORT_TURNS", ShortTurns())

    def fail() -> None:
        raise KeyError(turn_s())

    async def main() -> float:
        thread = LoaderThread()
        try:
            seen = await thread.run(turn_s)
            with pytest.raises(KeyError, match=str(TURN_S)):
                await thread.run(fail)
            return seen
        finally:
            thread.stop()

    assert asyncio.run(main()) == TURN_S
    assert turn_s() == LONG_S
