"""Clients that send more than anybody needs."""

from __future__ import annotations

import contextlib
import struct

import pytest

from serve.transports.grpc_framing import frame
from serve.transports.nghttp2 import reading_turns
from tests.serve.running_server import RunningServer
from tests.serve.transports.nghttp2.calls import SERVER_LIVE, Limited, serves
from tests.serve.transports.nghttp2.http2_peer import Http2Peer, call_headers, peer


def give_up(client: Http2Peer, calls: int) -> None:
    """Begin calls and reset each of them at once."""
    with contextlib.suppress(ConnectionError):
        for _ in range(calls):
            stream = client.http2.send_request(call_headers())
            client.push()
            client.http2.reset_stream(stream)
        client.push()


def test_rapid_resets_cost_the_connection_that_sends_them(limited: Limited) -> None:
    server = limited(reset_burst=100, resets_per_s=1)
    with peer(server) as hostile:
        give_up(hostile, 2000)
        assert hostile.is_closed_by_server()
    assert serves(server)


def test_a_client_may_give_up_all_calls_whose_deadlines_pass(nghttp2: RunningServer) -> None:
    with peer(nghttp2) as late:
        give_up(late, 2000)
        stream = late.http2.send_request(call_headers(SERVER_LIVE))
        late.http2.send_data(stream, frame(b""), end_stream=True)
        late.push()
        assert late.status(stream) == (0, "")


def test_a_flood_of_continuations_is_cut_off(nghttp2: RunningServer) -> None:
    with Http2Peer(nghttp2.address) as hostile:
        hostile.greet()
        block = b"\x00\x01a" + b"\x7f\x80\x7d" + b"v" * 16_000  # a literal header of sixteen thousand bytes
        headers = struct.pack(">I", len(block))[1:] + b"\x01\x00" + struct.pack(">I", 1) + block
        continuation = struct.pack(">I", len(block))[1:] + b"\x09\x00" + struct.pack(">I", 1) + block
        with contextlib.suppress(ConnectionError):
            hostile.socket.sendall(headers + continuation * 200)
        assert hostile.is_closed_by_server()
    assert serves(nghttp2)


def test_a_flood_in_one_piece_is_answered_in_full(nghttp2: RunningServer) -> None:
    with peer(nghttp2) as eager:
        streams = []
        for _ in range(1000):
            streams.append(eager.http2.send_request(call_headers(SERVER_LIVE)))
            eager.http2.send_data(streams[-1], frame(b""), end_stream=True)
        eager.push()
        assert all(eager.status(stream) == (0, "") for stream in streams)


def test_floods_that_wait_for_each_other_are_answered_in_full(nghttp2: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_turns, "TURN_S", 0.0)  # every other connection has to wait
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(peer(nghttp2)) for _ in range(8)]
        for eager in crowd:
            for _ in range(600):
                stream = eager.http2.send_request(call_headers(SERVER_LIVE))
                eager.http2.send_data(stream, frame(b""), end_stream=True)
        for eager in crowd:
            eager.push()
        assert serves(nghttp2)
        assert all(eager.status(2 * call + 1) == (0, "") for eager in crowd for call in range(600))
