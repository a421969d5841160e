from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfserve.serve.transports.read_scheduler import PIECES_A_TURN, SMALL_BYTES, TURN_S, ReadScheduler, read_scheduler

LARGE = SMALL_BYTES + 1
BUFFER = 2**18
PIECE_S = TURN_S * 0.4  # three pieces are more than a turn


class Loop:
    """An event loop on a clock of its own, with its sockets; reading a piece takes a while."""

    def __init__(self, piece_s: float = PIECE_S) -> None:
        self.now, self.piece_s = 0.0, piece_s
        self.soon: list[Callable[[], None]] = []
        self.scheduler = ReadScheduler(self.soon.append, lambda: self.now)
        self.connections: list[Connection] = []
        self.read: list[str] = []  # whose pieces, in order

    def turn(self) -> list[str]:
        """Call what was to be called soon, then poll the sockets; whose pieces were read."""
        before = len(self.read)
        calls = self.soon[:]
        self.soon.clear()
        for call in calls:
            call()
        for connection in self.connections:
            connection.poll()
        return self.read[before:]


class Connection:
    """What has come into the socket is read a piece at a time."""

    def __init__(self, loop: Loop, name: str, size: int = LARGE) -> None:
        self.loop, self.name, self.size = loop, name, size
        self.pieces = 0  # in the socket
        self.touched = 0  # reads of the socket
        self.kept = False
        self.listens = True
        loop.connections.append(self)

    def poll(self) -> None:
        while self.pieces and self.listens:
            self.pieces -= 1
            self.touched += 1
            if self.loop.scheduler.must_wait(self, self.size):
                self.kept, self.listens = True, False
                self.loop.scheduler.wait(self)
            else:
                self.take()

    def read_on(self) -> None:
        self.listens = True
        if self.kept:
            self.kept = False
            self.take()

    def take(self) -> None:
        self.loop.now += self.loop.piece_s
        self.loop.read.append(self.name)


def connections(loop: Loop, names: str, pieces: int = 1) -> list[Connection]:
    made = [Connection(loop, name) for name in names]
    for one in made:
        one.pieces = pieces
    return made


@pytest.fixture
def loop() -> Loop:
    return Loop()


def test_after_a_full_turn_the_rest_waits_in_order(loop: Loop) -> None:
    connections(loop, "abcde")
    assert loop.turn() == ["a", "b", "c"]
    assert loop.turn() == ["d", "e"]


def test_a_turn_reads_few_pieces_however_quick_they_are() -> None:
    loop = Loop(piece_s=0.0)
    connections(loop, "abcdefghij")
    assert len(loop.turn()) == PIECES_A_TURN
    assert len(loop.turn()) == PIECES_A_TURN


def test_small_input_is_read_whatever_else_has_come(loop: Loop) -> None:
    connections(loop, "abcde")
    probe = Connection(loop, "probe", SMALL_BYTES)
    probe.pieces = 1
    assert "probe" in loop.turn()


def test_a_connection_with_much_input_does_not_delay_the_others(loop: Loop) -> None:
    much, *_ = connections(loop, "Abcdef")
    much.pieces = 20
    read = [name for _ in range(3) for name in loop.turn()]
    assert set(read) == set("Abcdef")


def test_a_small_request_overtakes_a_crowd_of_uploads(loop: Loop) -> None:
    crowd = [Connection(loop, f"upload {number}", BUFFER) for number in range(30)]
    for upload in crowd:
        upload.pieces = 100
    for _ in range(3):
        loop.turn()
    small = Connection(loop, "small")
    for _ in range(5):
        small.pieces = 1
        assert "small" in loop.turn() + loop.turn() + loop.turn()


def test_ever_new_connections_do_not_hold_up_an_upload(loop: Loop) -> None:
    for name in ("upload", "other", "third", "fourth"):
        Connection(loop, name, BUFFER).pieces = 10
    newest = 0
    while loop.read.count("upload") < 3:
        for _ in range(2 * PIECES_A_TURN):
            newest += 1
            Connection(loop, "new").pieces = 1
        loop.turn()
        loop.connections = [one for one in loop.connections if one.pieces or one.kept]
        assert newest < 20 * BUFFER // SMALL_BYTES


def test_a_waiting_connection_is_not_polled(loop: Loop) -> None:
    crowd = connections(loop, "abcdefghij", pieces=50)
    loop.turn()
    assert all(one.touched for one in crowd)
    before = sum(one.touched for one in crowd)
    loop.turn()
    assert sum(one.touched for one in crowd) - before <= 2 * PIECES_A_TURN


def test_only_a_connection_whose_turn_it_is_fills_its_buffer(loop: Loop) -> None:
    crowd = connections(loop, "abcdefghij")
    assert {loop.scheduler.receive_bytes(one, BUFFER) for one in crowd} == {BUFFER}
    loop.turn()
    assert {loop.scheduler.receive_bytes(one, BUFFER) for one in crowd} == {LARGE}
    for call in loop.soon[:]:
        call()
    assert [one.name for one in crowd if loop.scheduler.receive_bytes(one, BUFFER) == BUFFER] == ["d", "e", "f"]


def test_an_unused_turn_ends_with_its_loop_iteration(loop: Loop) -> None:
    connections(loop, "abcde")
    while loop.soon or loop.read == []:
        loop.turn()
    late = connections(loop, "fghij")
    loop.turn()
    assert sum(one.pieces or one.kept for one in late) == 2


def test_an_idle_loop_is_left_alone(loop: Loop) -> None:
    connections(loop, "abcde")
    for _ in range(4):
        loop.turn()
    assert loop.soon == []


def test_one_that_fails_does_not_stop_the_queue(loop: Loop) -> None:
    class Broken(Connection):
        def take(self) -> None:
            raise RuntimeError(self.name)

    connections(loop, "abc")
    broken = Broken(loop, "broken")
    broken.pieces = 1
    connections(loop, "d")
    loop.turn()
    with pytest.raises(RuntimeError, match="broken"):
        loop.turn()
    assert loop.turn() == ["d"]


@given(st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 4), st.integers(1, 6)))))
def test_everything_is_read_and_no_turn_reads_for_long(script: list[tuple[int, int] | None]) -> None:
    loop = Loop()
    named, come = connections(loop, "abcde", 0), dict.fromkeys("abcde", 0)
    for step in script:
        if step is None:
            assert len(loop.turn()) <= 2 * PIECES_A_TURN
        else:
            named[step[0]].pieces += step[1]
            come[named[step[0]].name] += step[1]
    for _ in range(sum(come.values()) + 2):
        assert len(loop.turn()) <= 2 * PIECES_A_TURN
    assert come == {name: loop.read.count(name) for name in "abcde"}


def test_all_servers_of_a_loop_share_its_scheduler() -> None:
    async def two() -> tuple[ReadScheduler, ReadScheduler]:
        return read_scheduler(), read_scheduler()

    first, second = asyncio.run(two())
    assert first is second
    assert asyncio.run(two())[0] is not first
