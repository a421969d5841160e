"""Flow control: uploads at once, given up, and answers that are not read."""

from __future__ import annotations

import grpc
import pytest
from ngh2 import DataReceived, ResponseReceived, SettingsAcknowledged

from protos import inference_pb2 as pb
from serve.transports.grpc_framing import MessageReader, frame
from serve.transports.nghttp2.message_turns import MESSAGES_A_TURN
from tests.serve.running_server import RunningServer
from tests.serve.transports.nghttp2.calls import INFER_STREAM, INITIAL_WINDOW_SIZE, SERVER_LIVE, Limited, mlp_request
from tests.serve.transports.nghttp2.http2_peer import INFER, call_headers, peer


@pytest.mark.parametrize("connection_window_bytes", [1_000_000, 200_000])  # all streams' windows fit into it, or do not
def test_large_messages_at_once_all_become_whole(limited: Limited, connection_window_bytes: int) -> None:
    server = limited(max_held_bytes=10_000, stream_window_bytes=65_535, connection_window_bytes=connection_window_bytes)
    body = frame(mlp_request() + bytes([0x1A, 0x80, 0x80, 0x20]) + b"i" * 0x80000)  # a request with an id of half a megabyte
    with grpc.insecure_channel(server.address, [("grpc.max_receive_message_length", -1)]) as channel:
        infer = channel.unary_unary(INFER.decode(), response_deserializer=pb.ModelInferResponse.FromString)
        answers = [infer.future(body[5:], timeout=20) for _ in range(8)]
        assert [len(answer.result(20).id) for answer in answers] == [0x80000] * 8


def test_more_than_may_be_held_by_far_is_refused(limited: Limited) -> None:
    server = limited(max_held_bytes=10_000, stream_window_bytes=65_535, connection_window_bytes=2_000_000)
    with peer(server) as other:
        streams = [other.http2.send_request(call_headers()) for _ in range(22)]
        for stream in streams:
            other.http2.send_data(stream, frame(bytes(90_000))[:60_000])
            other.push()
        refused = [other.status(stream) for stream in streams[-4:]]
        assert {code for code, _ in refused} == {8}
        assert all(text.startswith("too much of large requests has come at once") for _, text in refused)
        other.http2.send_data(streams[0], frame(bytes(90_000))[60_000:], end_stream=True)
        other.push()
        assert other.status(streams[0])[0] == 3  # read, and found to be no request


def test_what_became_whole_in_a_later_turn_holds_nobody_back(limited: Limited) -> None:
    server = limited(max_held_bytes=10_000, stream_window_bytes=65_535)
    with peer(server) as other:
        stream, busy = (other.http2.send_request(call_headers(INFER_STREAM)) for _ in range(2))
        other.http2.send_data(stream, frame(bytes(60_000))[:50_000])
        other.push()
        other.http2.send_data(busy, frame(b"") * MESSAGES_A_TURN)
        first = other.http2.data_to_send()  # after which no more is read in this turn of the loop
        other.http2.send_data(stream, frame(bytes(60_000))[50_000:])
        other.socket.sendall(first + other.http2.data_to_send())
        other.until(DataReceived, stream)
        call = other.http2.send_request(call_headers())
        other.http2.send_data(call, frame(bytes(100_000)), end_stream=True)
        other.push()
        assert other.status(call)[0] == 3


def test_a_window_is_used_once_it_is_said_that_it_has_been_seen(nghttp2: RunningServer) -> None:
    """Until then the client, which libnghttp2 is, holds to the one before, and ends the connection of who does not."""
    with peer(nghttp2) as other:

        def call() -> int:
            stream = int(other.http2.send_request(call_headers(SERVER_LIVE)))
            other.http2.send_data(stream, frame(b""), end_stream=True)
            return stream

        for _ in range(2):  # others like them repeat
            stream = call()
            other.push()
            assert other.status(stream) == (0, "")
        other.http2.update_settings({INITIAL_WINDOW_SIZE: 0})
        other.push()
        other.events.clear()
        while not any(isinstance(event, SettingsAcknowledged) for event in other.events):
            assert other.read()
        other.http2.update_settings({INITIAL_WINDOW_SIZE: 65_535})
        stream = call()  # which is answered while the settings are read
        other.push()
        assert other.status(stream) == (0, "")


def test_abandoned_uploads_give_their_window_back(limited: Limited) -> None:
    server = limited(max_held_bytes=1000, connection_window_bytes=100_000)
    with peer(server) as other:
        for _ in range(20):
            kept, dropped = (other.http2.send_request(call_headers()) for _ in range(2))
            other.http2.send_data(kept, frame(bytes(20_000))[:10_000])
            other.http2.send_data(dropped, frame(bytes(20_000))[:15_000])
            other.push()
            other.http2.reset_stream(kept)
            other.http2.reset_stream(dropped)
            other.push()
        stream = other.http2.send_request(call_headers())
        other.http2.send_data(stream, frame(bytes(90_000)), end_stream=True)
        other.push()
        assert other.status(stream)[0] == 3


def test_a_client_that_does_not_read_gets_everything_once_it_does(nghttp2: RunningServer) -> None:
    with peer(nghttp2, {INITIAL_WINDOW_SIZE: 0}) as slow:
        streams = []
        for _ in range(20):
            streams.append(slow.http2.send_request(call_headers()))
            slow.http2.send_data(streams[-1], frame(mlp_request(16)), end_stream=True)
        slow.push()
        slow.until(ResponseReceived, streams[-1])
        assert slow.body(streams[-1]) == b""
        slow.http2.update_settings({INITIAL_WINDOW_SIZE: 65_535})
        slow.push()
        assert [slow.status(stream) for stream in streams] == [(0, "")] * 20
        assert {len(slow.body(stream)) for stream in streams} == {len(slow.body(streams[0]))}


def test_a_stream_whose_answers_are_not_read_may_send_no_more_until_they_are(limited: Limited) -> None:
    server = limited(stream_window_bytes=65_535, max_unsent_bytes=10_000)
    with peer(server, {INITIAL_WINDOW_SIZE: 0}) as slow:
        stream = slow.http2.send_request(call_headers(INFER_STREAM))
        slow.http2.send_data(stream, frame(mlp_request()) * 3000, end_stream=True)  # over half a megabyte
        slow.push()
        slow.until(ResponseReceived, stream)
        for _ in range(20):  # turns of the server: each is a call that it answers
            other = slow.http2.send_request(call_headers(b"/a/b"), end_stream=True)
            slow.push()
            assert slow.status(other)[0] == 12
        assert slow.http2.queued_body_size(stream) > 100_000
        slow.http2.update_settings({INITIAL_WINDOW_SIZE: 2**31 - 1})
        slow.http2.set_local_window_size(2**31 - 1)
        slow.push()
        assert slow.status(stream) == (0, "")
        answered = list(MessageReader(10_000).feed(slow.body(stream)))
        assert len(answered) == 3000
        assert all(not pb.ModelStreamInferResponse.FromString(answer).error_message for answer in answered)
