from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.transports.nghttp2.reading_turns import SMALL_BYTES, TURN_S, ReadingTurns

LARGE = SMALL_BYTES + 1
PIECE_S = TURN_S * 0.4  # three pieces are more than a turn


class Loop:
    """An event loop on a clock of its own; reading a piece takes a while."""

    def __init__(self) -> None:
        self.now = 0.0
        self.soon: list[Callable[[], None]] = []
        self.turns = ReadingTurns(self.soon.append, lambda: self.now)
        self.read: list[str] = []  # whose pieces, in order

    def next_turn(self) -> list[str]:
        """Call what was to be called soon; whose pieces were read by it."""
        before = len(self.read)
        calls = self.soon[:]
        self.soon.clear()
        for call in calls:
            call()
        return self.read[before:]


class Connection:
    """What has come is read a piece at a time."""

    def __init__(self, loop: Loop, name: str) -> None:
        self.loop, self.name = loop, name
        self.pieces = 0

    def come(self, pieces: int, size: int = LARGE) -> bool:
        """So much has come; whether some of it was read at once."""
        self.pieces += pieces
        if self.loop.turns.must_wait(size):
            self.loop.turns.wait(self)
            return False
        self.read_on()
        return True

    def read_on(self) -> None:
        self.loop.now += PIECE_S
        self.loop.read.append(self.name)
        self.pieces -= 1
        if self.pieces:
            self.loop.turns.wait(self)


@pytest.fixture
def loop() -> Loop:
    return Loop()


def connections(loop: Loop, names: str) -> list[Connection]:
    return [Connection(loop, name) for name in names]


def test_after_a_full_turn_the_rest_waits_in_order(loop: Loop) -> None:
    assert [one.come(1) for one in connections(loop, "abcde")] == [True, True, True, False, False]
    assert loop.next_turn() == ["d", "e"]
    assert loop.soon == []


def test_what_is_small_is_read_whatever_else_has_come(loop: Loop) -> None:
    for one in connections(loop, "abcde"):
        one.come(1)
    assert Connection(loop, "probe").come(1, SMALL_BYTES)


def test_who_has_most_does_not_come_before_who_has_little(loop: Loop) -> None:
    much, *others = connections(loop, "Abcdef")
    much.come(20)
    for one in others:
        one.come(1)
    assert loop.read == ["A", "b", "c"]
    assert loop.next_turn() == ["A", "d", "e"]
    assert loop.next_turn() == ["f", "A"]


def test_a_turn_that_has_read_from_the_line_reads_no_more_than_another(loop: Loop) -> None:
    for one in connections(loop, "abcdefg"):
        one.come(1)
    assert loop.next_turn() == ["d", "e", "f"]
    assert not Connection(loop, "h").come(1)
    assert loop.next_turn() == ["g", "h"]
    assert Connection(loop, "i").come(1)


def test_a_turn_begins_anew_when_the_loop_has_gone_round(loop: Loop) -> None:
    for one in connections(loop, "abc"):
        one.come(1)
    assert loop.next_turn() == []
    assert all(one.come(1) for one in connections(loop, "def"))


def test_one_that_fails_does_not_stop_the_line(loop: Loop) -> None:
    class Broken(Connection):
        def read_on(self) -> None:
            raise RuntimeError(self.name)

    for one in connections(loop, "abc"):
        one.come(1)
    broken, last = Broken(loop, "broken"), Connection(loop, "last")
    broken.come(1)
    last.come(1)
    with pytest.raises(RuntimeError, match="broken"):
        loop.next_turn()
    assert loop.next_turn() == ["last"]


@given(st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 4), st.integers(1, 6), st.sampled_from([SMALL_BYTES, LARGE])))))
def test_everything_is_read_and_no_turn_reads_for_long(script: list[tuple[int, int, int] | None]) -> None:
    loop = Loop()
    named, come = connections(loop, "abcde"), dict.fromkeys("abcde", 0)
    for step in script:
        if step is None:
            assert len(loop.next_turn()) <= 3
        elif not named[step[0]].pieces:  # others are not listened to
            named[step[0]].come(*step[1:])
            come[named[step[0]].name] += step[1]
    while loop.soon:
        assert len(loop.next_turn()) <= 3
    assert come == {name: loop.read.count(name) for name in "abcde"}
