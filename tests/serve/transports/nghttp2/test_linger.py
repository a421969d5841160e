from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.protocol.service import Service
from serve.transports.nghttp2 import linger as linger_module
from serve.transports.nghttp2.linger import FAILURE, LINGER_S, MOST, TRY_EVERY, Linger
from serve.transports.nghttp2.server import Nghttp2Server
from tests.serve.conftest import load_repository
from tests.serve.running_server import running_server
from tests.serve.transports.nghttp2.calls import mlp_request
from tests.serve.transports.nghttp2.http2_peer import INFER

TURN_S = LINGER_S / 10


class Loop:
    """An event loop on a clock of its own: it sleeps until the next answer, unless something is to be called soon."""

    def __init__(self) -> None:
        self.now = 0.0
        self.awake_s = 0.0
        self._soon: list[Callable[[], None]] = []
        self._linger = Linger(self._soon.append, lambda: self.now)

    def answer_after(self, gap_s: float, *, alone: bool = True) -> bool:
        """Whether the loop was awake when the next answer went out."""
        due, began = self.now + gap_s, self.now
        while self._soon and self.now < due:
            self._soon.pop()()
            self.now += TURN_S
        awake = bool(self._soon)
        self.awake_s += min(self.now, due) - began
        self.now = max(self.now, due)
        self._linger.answered(alone=alone)
        return awake


def test_while_requests_follow_each_other_the_loop_stays_awake() -> None:
    loop = Loop()
    awake = [loop.answer_after(LINGER_S / 2) for _ in range(10 * TRY_EVERY)]
    assert not any(awake[:TRY_EVERY])
    assert all(awake[TRY_EVERY:])


def test_while_they_are_far_between_it_sleeps_but_for_a_try_now_and_then() -> None:
    loop, count = Loop(), 100 * TRY_EVERY
    assert not any(loop.answer_after(100 * LINGER_S) for _ in range(count))
    assert loop.awake_s <= count / TRY_EVERY * (LINGER_S + 2 * TURN_S)


def test_a_pause_or_two_are_forgiven_and_more_end_it() -> None:
    loop = Loop()
    for _ in range(2 * TRY_EVERY):
        loop.answer_after(LINGER_S / 2)
    for _ in range(MOST // FAILURE - 1):
        assert not loop.answer_after(2 * LINGER_S)
    assert loop.answer_after(LINGER_S / 2)
    for _ in range(MOST):
        loop.answer_after(2 * LINGER_S)
    assert not loop.answer_after(LINGER_S / 2)


def test_where_answers_go_out_together_the_loop_sleeps() -> None:
    loop = Loop()
    for _ in range(2 * TRY_EVERY):
        loop.answer_after(LINGER_S / 2)
    assert loop.answer_after(LINGER_S / 2, alone=False)
    assert not any(loop.answer_after(LINGER_S / 2, alone=False) for _ in range(10 * TRY_EVERY))
    assert [loop.answer_after(LINGER_S / 2) for _ in range(3)] == [False, True, True], "what was learned holds"


@given(gaps=st.lists(st.floats(0, 4 * LINGER_S), max_size=200))
def test_the_loop_is_never_awake_for_longer_than_a_moment_after_an_answer(gaps: list[float]) -> None:
    loop = Loop()
    for gap in gaps:
        before = loop.awake_s
        loop.answer_after(gap)
        assert loop.awake_s - before <= LINGER_S + 2 * TURN_S


def test_a_server_whose_client_asks_one_thing_after_the_other_stays_awake(
    monkeypatch: pytest.MonkeyPatch, repository: Path
) -> None:
    monkeypatch.setattr(linger_module, "LINGER_S", 60.0)  # however slow the machine
    made: list[Nghttp2Server] = []
    request = mlp_request()

    def make(service: Service, host: str, port: int) -> Nghttp2Server:
        made.append(Nghttp2Server(service, host, port))
        return made[-1]

    with running_server(lambda: load_repository(repository), make) as server:
        with grpc.insecure_channel(server.address) as channel:
            infer = channel.unary_unary(INFER.decode())
            for _ in range(2 * TRY_EVERY):
                infer(request, timeout=20)
        learned = made[0]._linger
        assert learned is not None
        assert server.call(lambda: (learned._lingers, learned._worth)) == (True, MOST)
