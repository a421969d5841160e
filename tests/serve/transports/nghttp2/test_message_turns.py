"""Messages so small that a window holds a million of them: others are served meanwhile, and answers do not pile up."""

from __future__ import annotations

import asyncio

import grpc
from grpc_reflection.v1alpha import reflection_pb2 as reflection

from protos import inference_pb2 as pb
from serve.transports.grpc_framing import MessageReader, frame
from serve.transports.nghttp2.message_turns import COUNTS_AS_ONE_BYTES, MESSAGES_A_TURN, MessageTurns
from tests.serve.running_server import RunningServer
from tests.serve.transports.nghttp2.calls import INFER_STREAM, SERVER_LIVE, Limited, serves
from tests.serve.transports.nghttp2.http2_peer import Http2Peer, call_headers, peer

REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
MANY = 12_000  # empty messages, which fit into the window that every client has from the start


def many_empty_ones(client: Http2Peer, path: bytes, *, end: bool) -> int:
    stream = client.http2.send_request(call_headers(path))
    client.http2.send_data(stream, frame(b"") * MANY, end_stream=end)
    client.push()
    return stream


def heard(client: Http2Peer) -> None:
    """Wait until the server has read what was sent before."""
    stream = client.http2.send_request(call_headers(SERVER_LIVE))
    client.http2.send_data(stream, frame(b""), end_stream=True)
    client.push()
    assert client.status(stream) == (0, "")


def refused(server: RunningServer) -> int:
    return server.call(lambda: sum(server.core.figures.refused.values()))


def test_streams_take_turns_and_read_so_many_messages_in_each() -> None:
    left = {"first": 2 * MESSAGES_A_TURN, "second": 10}
    read: list[str] = []
    turns = MessageTurns()

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
        turns = MessageTurns()
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
