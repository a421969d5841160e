from __future__ import annotations

import asyncio
from collections import Counter
from typing import cast

import grpc
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from ngh2 import Connection, DataReceived, Event, ResponseReceived, Role, SettingsAcknowledged, StreamReset

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.security.memory_budget import DEFAULT_BYTES, MemoryBudget
from halfserve.serve.transports.grpc_framing import OK_TRAILERS, RESPONSE, MessageReader, frame
from halfserve.serve.transports.nghttp2.fairness import MESSAGES_A_TURN, TransportLimits
from halfserve.serve.transports.nghttp2.flow_control import REFUSED_WINDOWS, ReceiveWindows
from halfserve.serve.transports.nghttp2.wire import Wire
from tests.serve.running_server import RunningServer
from tests.serve.transports.nghttp2.http2_peer import (
    INFER,
    INFER_STREAM,
    INITIAL_WINDOW_SIZE,
    SERVER_LIVE,
    Limited,
    call_headers,
    mlp_request,
    peer,
)

MAX_HELD, WINDOW, CONNECTION_WINDOW, FRAME = 100, 40, 80, 30
LENGTHS = st.integers(1, 400)  # of messages
LIMITS = TransportLimits(max_held_bytes=MAX_HELD, stream_window_bytes=WINDOW, connection_window_bytes=CONNECTION_WINDOW)
MAX_UNSENT = 1000
LARGE = bytes(100_000)  # more than the window that a client opens a stream with


class Client(RuleBasedStateMachine):
    """A client that sends messages in pieces on many streams, as far as its windows allow.

    The windows behave as libnghttp2's: they are opened when half of them has been acknowledged, or made wider at once.
    """

    def __init__(self) -> None:
        super().__init__()
        http2 = cast("Connection", self)  # its two methods that open windows
        self.windows = ReceiveWindows(http2, LIMITS, MemoryBudget(DEFAULT_BYTES).share(is_known=True))
        self.width = self.may_send = 65_535
        self.not_told = 0
        self.windows.open(CONNECTION_WINDOW)
        self.left: dict[int, int] = {}  # stream -> bytes of its message that are still to be sent
        self.more: dict[int, list[int]] = {}  # stream -> lengths of the messages after that
        self.held: dict[int, int] = {}  # stream -> bytes that the server holds
        self.window: Counter[int] = Counter()  # stream -> bytes that may be sent
        self.not_told_of: Counter[int] = Counter()  # stream -> acknowledged bytes that the client does not know of
        self.not_told = 0  # acknowledged bytes that the client does not know of
        self.received = self.acknowledged = 0
        self.streams = 0

    def acknowledge_received_data(self, size: int, stream: int) -> None:
        assert size > 0
        self.acknowledged += size
        self.not_told_of[stream] += size
        if self.not_told_of[stream] >= WINDOW / 2:
            self.window[stream] += self.not_told_of.pop(stream)
        self.not_told += size
        self.tell()

    def set_local_window_size(self, width: int) -> None:
        self.may_send += width - self.width
        self.width = width
        self.tell()

    def tell(self) -> None:
        if self.not_told >= self.width / 2:
            self.may_send += self.not_told
            self.not_told = 0

    def able(self) -> list[int]:
        """The streams that may send now."""
        return [stream for stream in self.left if self.window[stream] > 0] if self.may_send > 0 else []

    @rule(length=LENGTHS, more=st.lists(LENGTHS, max_size=3))
    def open(self, length: int, more: list[int]) -> None:
        self.streams += 1
        self.left[self.streams], self.held[self.streams], self.window[self.streams] = length, 0, WINDOW
        self.more[self.streams] = more

    @precondition(lambda self: self.able())
    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        self.send_some(data.draw(st.sampled_from(self.able())), data.draw(st.integers(1, FRAME)))

    @precondition(lambda self: self.able())
    @rule()
    def send_all_that_may_be_sent(self) -> None:
        """Those that came last first: so that the oldest is not the one that always goes on."""
        while able := [stream for stream in self.able() if stream != min(self.left)]:
            self.send_some(able[-1], FRAME)

    @precondition(lambda self: self.left)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        self.close(data.draw(st.sampled_from(sorted(self.left))))

    def send_some(self, stream: int, size: int) -> None:
        size = min(size, self.window[stream], self.left[stream], self.may_send)
        self.window[stream] -= size
        self.may_send -= size
        self.left[stream] -= size
        self.received += size
        if not self.left[stream]:
            self.finish(stream, size)
            return
        self.held[stream] += size
        waits = self.windows.must_wait(stream, self.held[stream])
        if waits and self.windows.is_too_much:
            self.windows.answered(stream)
            self.windows.took(stream, size, size)
            self.close(stream)
        else:
            self.windows.took(stream, size, 0 if waits else size)

    def finish(self, stream: int, size: int) -> None:
        """The last bytes of a message have come."""
        if not self.more[stream]:
            self.windows.took(stream, size, size)
            self.close(stream)
            return
        self.left[stream], self.held[stream] = self.more[stream].pop(), 0
        assert not self.windows.must_wait(stream, 0)
        self.windows.took(stream, size, size)

    def close(self, stream: int) -> None:
        self.windows.answered(stream)
        self.windows.closed(stream)
        del self.left[stream], self.held[stream]

    @invariant()
    def nothing_is_acknowledged_twice(self) -> None:
        assert self.acknowledged <= self.received
        assert self.windows._held == sum(self.held.values())

    @invariant()
    def all_is_as_it_was_once_all_is_over(self) -> None:
        if not self.left:
            assert self.acknowledged == self.received
            assert self.width == CONNECTION_WINDOW

    @invariant()
    def what_is_held_is_bounded(self) -> None:
        """Over the bound, only the oldest message grows by more than the window that its stream had left."""
        oldest = next((s for s in self.held if self.held[s]), None)
        others = sum(held for stream, held in self.held.items() if stream != oldest)
        assert others <= min(MAX_HELD + (WINDOW + FRAME) * len(self.held), MAX_HELD + REFUSED_WINDOWS * WINDOW + FRAME)

    def teardown(self) -> None:
        """Whatever has been sent so far, all messages that are not refused can become whole."""
        while self.left:
            able = self.able()
            assert able, "nobody may send"
            for stream in reversed(able):
                if stream in self.left and self.may_send > 0:
                    self.send_some(stream, FRAME)


TestReceiveWindows = Client.TestCase
TestReceiveWindows.settings = settings(max_examples=100, stateful_step_count=50)


class Written(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))


class Scene:
    """A client that has begun a call and has not ended it, and the server's side of its connection."""

    def __init__(self) -> None:
        self.client, self.server, self.transport = Connection(Role.CLIENT), Connection(Role.SERVER), Written()
        self.client.initiate_connection()
        self.server.initiate_connection()
        self.stream = self.client.send_request(call_headers())
        self.server.receive_data(self.client.data_to_send())
        self.server.events()
        self.wire = Wire(self.server, MAX_UNSENT, lambda last: last, MemoryBudget(DEFAULT_BYTES).share(is_known=True))

    def answer(self, message: bytes) -> None:
        self.server.send_response(self.stream, RESPONSE)
        self.server.send_data(self.stream, message)
        self.server.send_trailers(self.stream, OK_TRAILERS)

    def write(self) -> list[Event]:
        """Write, let the client read all that its window has let through and open it again; return what it met."""
        self.wire.write(self.transport)
        for data in self.transport.written:
            self.client.receive_data(data)
        self.transport.written.clear()
        events = list(self.client.events())
        self.server.receive_data(self.client.data_to_send())
        self.server.events()
        return events


def is_reset(events: list[Event]) -> bool:
    return any(isinstance(event, StreamReset) for event in events)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_full_socket_is_given_nothing(scene: Scene) -> None:
    scene.answer(b"x")
    scene.wire.is_paused = True
    assert scene.write() == []
    scene.wire.is_paused = False
    assert scene.write() != []


def test_a_stream_is_reset_once_its_answer_has_left_and_not_before(scene: Scene) -> None:
    scene.wire.reset_when_out(scene.stream)
    scene.answer(LARGE)
    assert not is_reset(scene.write())  # the window has let a part through
    assert is_reset(scene.write())


def test_who_waits_for_a_slow_client_is_called_once_when_it_has_read(scene: Scene) -> None:
    called: list[int] = []
    scene.answer(LARGE)
    assert scene.wire.is_behind(scene.stream)
    scene.wire.when_read(scene.stream, lambda: called.append(1))
    scene.write()
    assert (called, scene.wire.is_behind(scene.stream)) == ([], True)
    scene.write()
    scene.write()
    assert (called, scene.wire.is_behind(scene.stream)) == ([1], False)


@pytest.mark.parametrize("end", ["stream", "connection"])
def test_nobody_is_called_for_what_is_over(scene: Scene, end: str) -> None:
    called: list[int] = []
    scene.wire.when_read(scene.stream, lambda: called.append(1))
    if end == "stream":
        scene.wire.closed(scene.stream)
    else:
        scene.wire.clear()
    scene.write()
    assert called == []


@pytest.mark.parametrize("connection_window_bytes", [1_000_000, 200_000])  # all streams' windows fit into it, or do not
def test_large_messages_at_once_all_become_whole(limited: Limited, connection_window_bytes: int) -> None:
    server = limited(max_held_bytes=10_000, stream_window_bytes=65_535, connection_window_bytes=connection_window_bytes)
    body = frame(mlp_request() + bytes([0x1A, 0x80, 0x80, 0x20]) + b"i" * 0x80000)  # a request with an id of half a megabyte
    with grpc.insecure_channel(server.address, [("grpc.max_receive_message_length", -1)]) as channel:
        infer = channel.unary_unary(INFER.decode(), response_deserializer=pb.ModelInferResponse.FromString)
        answers = [infer.future(body[5:], timeout=60) for _ in range(8)]
        assert [len(answer.result(60).id) for answer in answers] == [0x80000] * 8


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
        assert other.status(other.call(frame(bytes(100_000))))[0] == 3


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
        assert other.status(other.call(frame(bytes(90_000))))[0] == 3


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
