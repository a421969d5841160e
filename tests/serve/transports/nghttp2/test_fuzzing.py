"""Any bytes, and any course of calls: no crash, and each call gets its own answer."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from enum import Enum
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from ngh2 import NGH2Error

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.transports.grpc_framing import PREFIX_BYTES, frame
from halfserve.serve.transports.nghttp2.frames import HEADER_TABLE_SIZE, INITIAL_WINDOW_SIZE
from halfserve.serve.transports.nghttp2.server import Nghttp2Server
from tests.serve.engine.fakes import HeldBackend, held_model
from tests.serve.running_server import RunningServer, running_server
from tests.serve.transports.nghttp2.connection_scene import Scene, begun, on_a_loop
from tests.serve.transports.nghttp2.http2_peer import INFER, Http2Peer, call_headers

pytestmark = pytest.mark.long
PATHS = st.sampled_from([INFER, b"/inference.GRPCInferenceService/ServerLive", b"/grpc.health.v1.Health/Watch", b"/x/y"])
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"
ANNOUNCED = {1: 40, 2: 3000}  # by their choice modulo 4, calls that say how long their request is, and that length
SIZES = st.integers(0, 40) | st.integers(0, 3000) | st.integers(0, 200_000)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(lambda: [held_model(HeldBackend())], Nghttp2Server) as running:
        yield running


def raw_frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def request(value: float) -> bytes:
    message = pb.ModelInferRequest(model_name="held", raw_input_contents=[struct.pack("<f", value)])
    message.inputs.add(name="x", datatype="FP32", shape=[1, 1])
    return message.SerializeToString()


class AnyFrames(RuleBasedStateMachine):
    """One hostile connection and one honest one on the same server."""

    address = ""

    @initialize()
    def connect(self) -> None:
        self.hostile = Http2Peer(self.address).greet()
        self.honest = Http2Peer(self.address).greet()
        self.streams: list[int] = []

    @rule(path=PATHS, end=st.booleans())
    def open_a_call(self, path: bytes, end: bool) -> None:
        with contextlib.suppress(NGH2Error, ConnectionError):
            self.streams.append(self.hostile.http2.send_request(call_headers(path), end_stream=end))
            self.hostile.push()

    @rule(data=st.binary(max_size=60) | st.just(frame(request(1.0))), end=st.booleans(), choice=st.integers(0, 99))
    def send_data(self, data: bytes, end: bool, choice: int) -> None:
        if self.streams:
            with contextlib.suppress(NGH2Error, ConnectionError):
                stream = self.streams[choice % len(self.streams)]
                self.hostile.http2.send_data(stream, data, end_stream=end)
                self.hostile.push()

    @rule(code=st.integers(0, 13))
    def reset_the_last_call(self, code: int) -> None:
        if self.streams:
            with contextlib.suppress(NGH2Error, ConnectionError):
                self.hostile.http2.reset_stream(self.streams.pop(), code)
                self.hostile.push()

    @rule(
        kind=st.integers(0, 12),
        flags=st.integers(0, 255),
        stream=st.integers(0, 9),
        payload=st.binary(max_size=40),
        cut=st.integers(0, 49),
    )
    def send_a_frame_on_a_connection_of_its_own(self, kind: int, flags: int, stream: int, payload: bytes, cut: int) -> None:
        with Http2Peer(self.address) as stranger, contextlib.suppress(ConnectionError):
            stranger.socket.sendall(PREFACE + raw_frame(kind, flags, stream, payload)[: cut or None])

    @rule(kind=st.integers(0, 12), flags=st.integers(0, 255), stream=st.integers(0, 9), payload=st.binary(max_size=40))
    def send_a_frame_among_the_calls(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        with contextlib.suppress(ConnectionError):
            self.hostile.socket.sendall(raw_frame(kind, flags, stream, payload))

    @rule()
    def start_anew(self) -> None:
        self.hostile.socket.close()
        self.hostile = Http2Peer(self.address).greet()
        self.streams = []

    @invariant()
    def the_honest_are_served(self) -> None:
        stream = self.honest.http2.send_request(call_headers())
        self.honest.http2.send_data(stream, frame(request(3.0)), end_stream=True)
        self.honest.push()
        assert self.honest.status(stream) == (0, "")
        answer = pb.ModelInferResponse.FromString(self.honest.body(stream)[5:])
        assert answer.raw_output_contents[0] == struct.pack("<f", 4.0)
        self.honest.events.clear()

    def teardown(self) -> None:
        self.hostile.socket.close()
        self.honest.socket.close()


def test_any_frames(server: RunningServer) -> None:
    machine = type("Machine", (AnyFrames,), {"address": server.address})
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)),
    )


class Step(Enum):
    """What a client or the server may do next."""

    CALL, PIECES, OTHER, ANSWER, FAIL, RESET, GO_ON, HAND_OVER = range(8)


STEPS = [*Step, Step.CALL, Step.CALL, Step.PIECES, Step.ANSWER]


class Story:
    """What happens on one connection, and what must come of it."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.sent: dict[int, bytes] = {}
        self.growing: dict[int, bytes] = {}  # what is still to be sent
        self.answers: dict[int, bytes] = {}
        self.failed: set[int] = set()

    def take(self, step: Step, body: bytes, choice: int) -> None:
        """Do one thing, if it can be done."""
        scene, ready = self.scene, [stream for stream in self.scene.waiting if stream in self.sent]
        size = ANNOUNCED.get(choice % 4)
        if size is not None:
            body = body[:size].ljust(size)
        call = scene.call if size is None else partial(scene.call, content_length=b"%d" % (size + PREFIX_BYTES))
        if step in (Step.CALL, Step.OTHER):
            self.sent[call(frame(body), b"/a/b" if step is Step.CALL else b"/other/%d" % choice)] = body
        elif step is Step.PIECES:
            whole, middle = frame(body), len(body) * choice // 99
            stream = call(whole[:middle], end=False)
            self.sent[stream], self.growing[stream] = body, whole[middle:]
        elif step is Step.GO_ON and self.growing:
            stream = sorted(self.growing)[choice % len(self.growing)]
            scene.client.send_data(stream, self.growing.pop(stream), end_stream=True)
        elif step is Step.HAND_OVER and not choice:
            scene.client.update_settings({HEADER_TABLE_SIZE: 0})  # from now on libnghttp2 does everything
        elif ready:
            self._end(step, ready[choice % len(ready)], body)

    def _end(self, step: Step, stream: int, body: bytes) -> None:
        if step is Step.ANSWER:
            self.answers[stream] = self.scene.waiting[stream] + body
            self.scene.answer(stream, body)
        elif step is Step.FAIL:
            self.failed.add(stream)
            self.scene.fail(stream, "e" * min(len(body), 30_000))
        elif step is Step.RESET:
            self.scene.client.reset_stream(stream)
            del self.sent[stream]

    def check(self) -> None:
        """Everything has been sent and answered."""
        assert not self.scene.wire.has_closed
        assert not self.scene.connection.session.calls
        for stream, body in self.sent.items():
            if stream in self.failed:
                assert self.scene.status(stream) == 13
            else:
                assert self.scene.answered(stream) == [self.answers[stream]]
                assert self.answers[stream].startswith(body)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(STEPS), SIZES, st.integers(0, 99)), min_size=4, max_size=40),
    st.lists(st.integers(1, 60) | st.integers(1, 30_000), min_size=1, max_size=12),
    st.sampled_from([65_535, 100_000, 2**22]),
    st.sampled_from([0, 10, 1000, 65_535, 2**22]),
    st.sampled_from([65_535, 400_000, 2**24]),
)
@on_a_loop
async def test_whatever_happens_each_call_gets_its_own_answer(
    steps: list[tuple[Step, int, int]], cuts: list[int], window: int, stream_window: int, server_window: int
) -> None:
    """The client checks the server's flow control, and the server's windows must let every request through."""

    limits = {"stream_window_bytes": max(65_535, server_window // 4), "connection_window_bytes": server_window}
    scene = await begun({INITIAL_WINDOW_SIZE: stream_window}, window, **limits)
    story = Story(scene)
    for number, (step, size, choice) in enumerate(steps):
        story.take(step, b"%d" % number + bytes(size), choice)
        await scene.exchange(cuts)
    while story.growing:
        story.take(Step.GO_ON, b"", 0)
    await scene.exchange(cuts)
    for stream in list(scene.waiting):
        story.answers[stream] = scene.waiting[stream]
        scene.answer(stream)
    scene.client.update_settings({INITIAL_WINDOW_SIZE: 2**30})
    scene.client.set_local_window_size(2**30)
    await scene.exchange()
    story.check()
