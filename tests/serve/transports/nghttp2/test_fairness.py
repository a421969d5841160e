from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2 as reflection
from hypothesis import given
from hypothesis import strategies as st

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.protocol.service import Service
from halfserve.serve.transports.grpc_framing import MessageReader, frame
from halfserve.serve.transports.nghttp2 import server as nghttp2_server
from halfserve.serve.transports.nghttp2.fairness import (
    COUNTS_AS_ONE_BYTES,
    MESSAGES_A_TURN,
    MessageQuota,
)
from halfserve.serve.transports.nghttp2.server import BUSY_POLL_S, FAILURE, MAX_WORTH, TRY_EVERY, BusyPoll, Nghttp2Server
from tests.serve.conftest import load_repository
from tests.serve.running_server import RunningServer, running_server
from tests.serve.transports.nghttp2.http2_peer import (
    INFER,
    INFER_STREAM,
    SERVER_LIVE,
    Http2Peer,
    Limited,
    call_headers,
    mlp_request,
    peer,
    serves,
)

STEP_S = BUSY_POLL_S / 10
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
MANY = 12_000  # empty messages, which fit into the window that every client has from the start


class PollingLoop:
    """An event loop on a clock of its own: it sleeps until the next answer, unless something is to be called soon."""

    def __init__(self) -> None:
        self.now = 0.0
        self.awake_s = 0.0
        self._soon: list[Callable[[], None]] = []
        self._busy_poll = BusyPoll(self._soon.append, lambda: self.now)

    def answer_after(self, gap_s: float, *, alone: bool = True) -> bool:
        """Whether the loop was awake when the next answer went out."""
        due, began = self.now + gap_s, self.now
        while self._soon and self.now < due:
            self._soon.pop()()
            self.now += STEP_S
        awake = bool(self._soon)
        self.awake_s += min(self.now, due) - began
        self.now = max(self.now, due)
        self._busy_poll.answered(alone=alone)
        return awake


def test_while_requests_follow_each_other_the_loop_stays_awake() -> None:
    loop = PollingLoop()
    awake = [loop.answer_after(BUSY_POLL_S / 2) for _ in range(10 * TRY_EVERY)]
    assert not any(awake[:TRY_EVERY])
    assert all(awake[TRY_EVERY:])


def test_while_they_are_far_between_it_sleeps_but_for_a_try_now_and_then() -> None:
    loop, count = PollingLoop(), 100 * TRY_EVERY
    assert not any(loop.answer_after(100 * BUSY_POLL_S) for _ in range(count))
    assert loop.awake_s <= count / TRY_EVERY * (BUSY_POLL_S + 2 * STEP_S)


def test_a_pause_or_two_are_forgiven_and_more_end_it() -> None:
    loop = PollingLoop()
    for _ in range(2 * TRY_EVERY):
        loop.answer_after(BUSY_POLL_S / 2)
    for _ in range(MAX_WORTH // FAILURE - 1):
        assert not loop.answer_after(2 * BUSY_POLL_S)
    assert loop.answer_after(BUSY_POLL_S / 2)
    for _ in range(MAX_WORTH):
        loop.answer_after(2 * BUSY_POLL_S)
    assert not loop.answer_after(BUSY_POLL_S / 2)


def test_where_answers_go_out_together_the_loop_sleeps() -> None:
    loop = PollingLoop()
    for _ in range(2 * TRY_EVERY):
        loop.answer_after(BUSY_POLL_S / 2)
    assert loop.answer_after(BUSY_POLL_S / 2, alone=False)
    assert not any(loop.answer_after(BUSY_POLL_S / 2, alone=False) for _ in range(10 * TRY_EVERY))
    assert [loop.answer_after(BUSY_POLL_S / 2) for _ in range(3)] == [False, True, True], "what was learned holds"


@given(gaps=st.lists(st.floats(0, 4 * BUSY_POLL_S), max_size=200))
def test_the_loop_is_never_awake_for_longer_than_a_moment_after_an_answer(gaps: list[float]) -> None:
    loop = PollingLoop()
    for gap in gaps:
        before = loop.awake_s
        loop.answer_after(gap)
        assert loop.awake_s - before <= BUSY_POLL_S + 2 * STEP_S


def test_a_server_whose_client_asks_one_thing_after_the_other_stays_awake(
    monkeypatch: pytest.MonkeyPatch, repository: Path
) -> None:
    monkeypatch.setattr(nghttp2_server, "BUSY_POLL_S", 60.0)  # however slow the machine
    made: list[Nghttp2Server] = []
    request = mlp_request()

    def make(service: Service, host: str, port: int) -> Nghttp2Server:
        made.append(Nghttp2Server(service, host, port))
        return made[-1]

    with running_server(lambda: load_repository(repository), make) as server:
        with grpc.insecure_channel(server.address) as channel:
            infer = channel.unary_unary(INFER.decode())
            for _ in range(2 * TRY_EVERY):
                infer(request, timeout=60)
        learned = made[0]._busy_poll
        assert learned is not None
        assert server.call(lambda: (learned._polls, learned._worth)) == (True, MAX_WORTH)


def many_empty_ones(client: Http2Peer, path: bytes, *, end: bool) -> int:
    stream = client.http2.send_request(call_headers(path))
    client.http2.send_data(stream, frame(b"") * MANY, end_stream=end)
    client.push()
    return stream


def heard(client: Http2Peer) -> None:
    """Wait until the server has read what was sent before."""
    assert client.status(client.call(frame(b""), SERVER_LIVE)) == (0, "")


def refused(server: RunningServer) -> int:
    return server.call(lambda: sum(server.core.figures.refused.values()))


def test_streams_take_turns_and_read_so_many_messages_in_each() -> None:
    left = {"first": 2 * MESSAGES_A_TURN, "second": 10}
    read: list[str] = []
    turns = MessageQuota()

    def go_on(name: str) -> None:
        while left[name]:
            if not turns.may_read():
                turns.when_next(lambda: go_on(name))
                return
            left[name] -= 1
            read.append(name)

    async def take() -> list[int]:
        counts = []
        for name in left:
            go_on(name)
        while any(left.values()):
            counts.append(len(read))
            await asyncio.sleep(0)
        return counts

    assert asyncio.run(take()) == [MESSAGES_A_TURN, 2 * MESSAGES_A_TURN]
    assert read[-10:] == ["second"] * 10


def test_large_messages_end_a_turn_sooner() -> None:
    async def take() -> list[bool]:
        turns = MessageQuota()
        may = [turns.may_read()]
        for size in (COUNTS_AS_ONE_BYTES - 1, 200 * COUNTS_AS_ONE_BYTES, 2**31 - 1):
            turns.spend(size)
            may.append(turns.may_read())
        await asyncio.sleep(0)
        return [*may, turns.may_read()]

    assert asyncio.run(take()) == [True, True, True, False, True]


def test_requests_wait_while_nobody_reads_their_answers(limited: Limited) -> None:
    server = limited(max_unsent_bytes=10_000)
    with peer(server) as greedy:
        stream = many_empty_ones(greedy, INFER_STREAM, end=True)
        heard(greedy)
        assert serves(server)
        assert refused(server) < MANY / 4  # what is unsent, what the client's windows take, and a turn's
        greedy.http2.set_local_window_size(2**30)
        assert greedy.status(stream) == (0, "")
        answers = list(MessageReader(2**20).feed(greedy.body(stream)))
    assert len(answers) == MANY == refused(server)
    assert "model ''" in pb.ModelStreamInferResponse.FromString(answers[-1]).error_message


def test_a_stream_that_is_given_up_reads_no_further(limited: Limited) -> None:
    server = limited(max_unsent_bytes=10_000)
    with peer(server) as greedy:
        stream = many_empty_ones(greedy, INFER_STREAM, end=False)
        heard(greedy)
        greedy.http2.reset_stream(stream, 8)
        greedy.push()
        heard(greedy)
        before = refused(server)
        assert serves(server)
        assert refused(server) == before < MANY


def test_other_streams_read_as_their_answers_are_read_too(limited: Limited) -> None:
    server = limited(max_unsent_bytes=1000)
    with grpc.insecure_channel(server.address) as channel:
        call = channel.stream_stream(REFLECTION, None, reflection.ServerReflectionResponse.FromString)
        assert sum(1 for _ in call(iter([b""] * 2000), timeout=60)) == 2000
