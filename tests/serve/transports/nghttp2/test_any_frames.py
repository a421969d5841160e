"""Random frames, whole and cut, in any order: the server outlives them, and what is a proper call is answered properly."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from ngh2 import NGH2Error

from protos import inference_pb2 as pb
from serve.transports.grpc_framing import frame
from serve.transports.nghttp2.server import Nghttp2Server
from tests.serve.engine.fakes import HeldBackend, held_model
from tests.serve.running_server import RunningServer, running_server
from tests.serve.transports.nghttp2.http2_peer import INFER, Http2Peer, call_headers

PATHS = st.sampled_from([INFER, b"/inference.GRPCInferenceService/ServerLive", b"/grpc.health.v1.Health/Watch", b"/x/y"])
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"


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
