"""A client that speaks HTTP/2 by hand, for what no gRPC client would do."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from ngh2 import Connection, DataReceived, Event, ResponseReceived, Role, StreamReset, TrailersReceived

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.transports.grpc_framing import frame
from tests.serve.running_server import WAIT_S, RunningServer

INFER = b"/inference.GRPCInferenceService/ModelInfer"
WINDOW_BYTES = 2**22  # of the connection, as gRPC's own clients open it
SERVER_LIVE = b"/inference.GRPCInferenceService/ServerLive"
INFER_STREAM = b"/inference.GRPCInferenceService/ModelStreamInfer"
INITIAL_WINDOW_SIZE = 4
Limited = Callable[..., RunningServer]


def call_headers(path: bytes = INFER, **extra: bytes) -> list[tuple[bytes, bytes]]:
    """The headers of a gRPC call; keyword `grpc_timeout` is the header grpc-timeout."""
    headers = [(b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"x"), (b":path", path)]
    headers += [(b"content-type", b"application/grpc"), (b"te", b"trailers")]
    return headers + [(name.replace("_", "-").encode(), value) for name, value in extra.items()]


class Http2Peer:
    """One connection; nothing is sent or read unless it is asked for."""

    def __init__(self, address: str) -> None:
        host, port = address.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)), WAIT_S)
        self.http2 = Connection(Role.CLIENT)
        self.events: list[Event] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.socket.close()

    def greet(self, settings: dict[int, int] | None = None) -> Http2Peer:
        """Say HTTP/2's first words."""
        self.http2.initiate_connection(settings)
        self.http2.set_local_window_size(WINDOW_BYTES)
        self.push()
        return self

    def call(self, data: bytes, path: bytes = INFER, **extra: bytes) -> int:
        """Send a whole call; returns its stream. `data` is framed already, `extra` as in `call_headers`."""
        stream = int(self.http2.send_request(call_headers(path, **extra)))
        self.http2.send_data(stream, data, end_stream=True)
        self.push()
        return stream

    def push(self) -> None:
        """Send what there is to send."""
        if data := self.http2.data_to_send():
            self.socket.sendall(data)

    def read(self) -> bool:
        """Read once; False at the end of the connection."""
        try:
            data = self.socket.recv(65536)
            if data:
                self.http2.receive_data(data)
                self.events += self.http2.events()
                self.push()
        except ConnectionError:
            return False
        return bool(data)

    def until(self, kind: type[Event], stream: int) -> Event:
        """Read until an event of this kind has come for the stream, and return it."""
        while True:
            for event in self.events:
                if isinstance(event, kind) and getattr(event, "stream_id", None) == stream:
                    return event
            assert self.read(), f"the connection ended before {kind.__name__}; had {self.events}"

    def is_closed_by_server(self) -> bool:
        """Read to the end, whatever comes; the socket's timeout fails the test where there is none."""
        try:
            while self.socket.recv(65536):
                pass
        except ConnectionError:
            pass
        return True

    def body(self, stream: int) -> bytes:
        """What has come of a stream's data."""
        return b"".join(event.data for event in self.events if isinstance(event, DataReceived) and event.stream_id == stream)

    def status(self, stream: int) -> tuple[int, str]:
        """gRPC's status and text, from the trailers or from headers that are all there is."""
        while True:
            for event in self.events:
                if isinstance(event, TrailersReceived | ResponseReceived) and event.stream_id == stream:
                    fields = dict(event.headers)
                    if b"grpc-status" in fields:
                        return int(fields[b"grpc-status"]), fields.get(b"grpc-message", b"").decode()
                assert not (isinstance(event, StreamReset) and event.stream_id == stream), "reset without a status"
            assert self.read(), f"the connection ended without a status; had {self.events}"


@contextmanager
def peer(server: RunningServer, settings: dict[int, int] | None = None) -> Iterator[Http2Peer]:
    """A connection that has greeted."""
    with Http2Peer(server.address) as connected:
        yield connected.greet(settings)


def mlp_request(rows: int = 1) -> bytes:
    request = pb.ModelInferRequest(model_name="mlp", raw_input_contents=[bytes(128 * rows)])
    request.inputs.add(name="x", datatype="FP16", shape=[rows, 64])
    return request.SerializeToString()


def padded(size: int) -> bytes:
    """A request with an id of so many bytes, which its answer has too."""
    length = bytes([size & 0x7F | 0x80, size >> 7 & 0x7F | 0x80, size >> 14 & 0x7F | 0x80, size >> 21])
    return mlp_request() + b"\x1a" + length + b"i" * size


def serves(server: RunningServer) -> bool:
    with peer(server) as other:
        stream = other.call(frame(mlp_request()))
        return other.status(stream) == (0, "") and len(pb.ModelInferResponse.FromString(other.body(stream)[5:]).outputs) == 1
