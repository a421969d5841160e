"""One connection of the server without a socket, its calls answered on demand, and a client of libnghttp2."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from typing import Any, ParamSpec

from ngh2 import Connection, DataReceived, Event, Header, ResponseReceived, Role, StreamReset, TrailersReceived
from ngh2.exceptions import NGH2Error

from halfserve.serve.engine.errors import InferenceError
from halfserve.serve.protocol.inference import Cancel, ManyReplies, Reply
from halfserve.serve.protocol.status import Status
from halfserve.serve.security.memory_budget import DEFAULT_BYTES, MemoryBudget
from halfserve.serve.transports.grpc_framing import MessageReader, frame
from halfserve.serve.transports.nghttp2.calls import InferCall, RefusedCall
from halfserve.serve.transports.nghttp2.connection import GrpcConnection
from halfserve.serve.transports.nghttp2.fairness import TransportLimits
from halfserve.serve.transports.nghttp2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEAD,
    HEADERS,
    RST_STREAM,
    head_of,
    literals,
)
from halfserve.serve.transports.nghttp2.pending_requests import Call
from halfserve.serve.transports.nghttp2.session import GrpcSession, OpenCall
from halfserve.serve.transports.read_scheduler import ReadScheduler
from tests.serve.transports.nghttp2.http2_peer import WINDOW_BYTES, call_headers

FIRST = 101  # a stream that the client does not know of
FIELD = literals([(b"a", b"b")])


class Wire(asyncio.Transport):
    """Keeps what is written; it `pauses` while nothing is to be read, and `listens_on` if it is closed on this side alone."""

    def __init__(self) -> None:
        super().__init__()
        self.written: deque[bytes] = deque()
        self.pauses = self.has_closed = self.listens_on = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.listens_on, "written after its end"  # as a real one would say
        self.written.append(bytes(data))

    def pause_reading(self) -> None:
        self.pauses = True

    def resume_reading(self) -> None:
        self.pauses = False

    def get_write_buffer_size(self) -> int:
        return 0

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.has_closed = self.listens_on = True

    def close(self) -> None:
        self.has_closed = True


class ConnectionServer:
    """A server of one connection that writes at once, unless the scene is to wait with that."""

    def __init__(self, scene: Scene) -> None:
        self.received = bytearray(2**18)
        self.budget = MemoryBudget(DEFAULT_BYTES)
        # No time passes, so that nothing is left for a later iteration of the loop.
        self.read_scheduler = ReadScheduler(asyncio.get_running_loop().call_soon, clock=float)
        self._scene = scene

    def connected(self, connection: GrpcConnection) -> None:
        pass

    def disconnected(self, connection: GrpcConnection) -> None:
        pass

    def unread(self, size: int) -> None:
        pass

    def broken(self, error: NGH2Error) -> None:
        pass

    def flush_soon(self, connection: GrpcConnection) -> None:
        if self._scene.flushes:
            connection.flush()

    def flush_last(self, connection: GrpcConnection) -> None:
        self.flush_soon(connection)

    def sent(self, connection: GrpcConnection) -> None:
        pass


class WaitingInference:
    """Takes requests and answers none."""

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self._take = take

    def infer(
        self, data: bytes | memoryview, time_left_s: float | None, reply: Reply, *, many: ManyReplies | None = None
    ) -> Cancel:
        self._take(bytes(data))
        return lambda: None

    def failed(self, data: bytes, error: Exception) -> None: ...
    def gone(self, data: bytes) -> None: ...


class WaitingCall:
    """Is answered later, with its own request and some bytes more."""

    is_unary = True

    def __init__(self, session: GrpcSession, stream: int, waiting: dict[int, bytes], gone: list[int]) -> None:
        self._stream, self._waiting, self._who_went = stream, waiting, gone
        self._call = call = InferCall(None, WaitingInference(self._wait), None, session, stream)
        self.receive, self.receive_last, self.take, self.grew = call.receive, call.receive_last, call.take, call.grew
        self.end, self.give_up, self.give_up_stalled = call.end, call.give_up, call.give_up_stalled

    @property
    def held_bytes(self) -> int:
        return self._call.held_bytes

    def gone(self) -> None:
        self._waiting.pop(self._stream, None)
        self._who_went.append(self._stream)

    def _wait(self, message: bytes) -> None:
        assert self._stream not in self._waiting, "answered twice"
        self._waiting[self._stream] = message


class Scene:
    """The server's side at `connection`, the client's at `client`."""

    def __init__(self, settings: dict[int, int] | None = None, window_bytes: int = WINDOW_BYTES, **limits: int) -> None:
        self.waiting: dict[int, bytes] = {}
        self.gone: list[int] = []
        self.refusal: InferenceError | None = None  # for calls that begin
        self.flushes = True  # what is answered, at once
        self.opened: list[dict[bytes, bytes]] = []  # the headers that calls were looked up by
        self.client, self.wire = Connection(Role.CLIENT), Wire()
        self.connection = GrpcConnection(ConnectionServer(self), self._route, TransportLimits(**limits))
        self.connection.connection_made(self.wire)
        self.events: list[Event] = []
        self.client.initiate_connection(settings)
        if window_bytes > 65_535:
            self.client.set_local_window_size(window_bytes)

    def _route(self, headers: Sequence[Header], session: GrpcSession) -> OpenCall:
        session.share.trust()
        self.opened.append(dict(headers))
        return self._open

    def _open(self, session: GrpcSession, stream: int) -> Call:
        if self.refusal is not None:
            return RefusedCall(session, stream, self.refusal)
        return WaitingCall(session, stream, self.waiting, self.gone)

    @property
    def untold(self) -> list[int]:
        """Streams of the calls in flight that libnghttp2 does not know of."""
        return list(self.connection._fast_path._granted)

    @property
    def block(self) -> bytes:
        """What a call begins with that repeats."""
        (block,) = self.connection._fast_path.templates
        return block

    def call(self, body: bytes, path: bytes = b"/a/b", *, end: bool = True, **headers: bytes) -> int:
        """Begin a call, without sending it."""
        stream = self.client.send_request(call_headers(path, **headers))
        self.client.send_data(stream, body, end_stream=end)
        return stream

    def push(self, cuts: list[int] | None = None) -> None:
        """Send what the client has to send, in pieces of these sizes, over and over."""
        data = self.client.data_to_send()
        place = 0
        for size in cuts or [len(data)]:
            if place < len(data):
                self.connection.data_received(memoryview(data)[place : place + size])
            place += size
        if place < len(data):
            self.connection.data_received(memoryview(data)[place:])

    def read(self) -> None:
        """Let the client read all that was written."""
        while self.wire.written:
            self.client.receive_data(self.wire.written.popleft())
        self.events += self.client.events()

    def send(self, frames: bytes) -> None:
        """Send bytes that are not the client's own."""
        self.connection.data_received(memoryview(frames))

    def frames(self) -> list[tuple[int, int, int, bytes]]:
        """What was written and not read, as frames: kind, flags, stream, payload."""
        data, place, found = b"".join(self.wire.written), 0, []
        self.wire.written.clear()
        while place < len(data):
            length, flags, stream = HEAD.unpack_from(data, place)
            end = place + HEAD.size + (length >> 8)
            found.append((length & 0xFF, flags, stream, data[place + HEAD.size : end]))
            place = end
        return found

    async def exchange(self, cuts: list[int] | None = None) -> None:
        """Send and read until neither side has anything to say."""
        while True:
            self.push(cuts)
            while self.wire.pauses:  # noqa: ASYNC110  (there is more than one turn of the loop takes)
                await asyncio.sleep(0)
            self.read()
            if not self.client.want_write:
                return

    def answer(self, stream: int, more: bytes = b"") -> None:
        """Answer a call with its request and some bytes more."""
        self.connection.session.answer(stream, self.waiting.pop(stream) + more)

    def fail(self, stream: int, text: str, *, ended: bool = True) -> None:
        """End a call with a status."""
        self.waiting.pop(stream, None)
        self.connection.session.fail(stream, Status(13, text), ended=ended)

    def answered(self, stream: int) -> list[bytes] | None:
        """The messages that came, where the call has ended well; None where it has not ended."""
        mine = [event for event in self.events if getattr(event, "stream_id", None) == stream]
        body = b"".join(event.data for event in mine if isinstance(event, DataReceived))
        ends = [dict(event.headers) for event in mine if isinstance(event, TrailersReceived)]
        return list(MessageReader(2**30).feed(body)) if ends and ends[0][b"grpc-status"] == b"0" else None

    def status(self, stream: int) -> int | None:
        """gRPC's status; -1 for a stream that was reset without one, None for one that has not ended."""
        mine = [event for event in self.events if getattr(event, "stream_id", None) == stream]
        for event in mine:
            if isinstance(event, TrailersReceived | ResponseReceived) and b"grpc-status" in dict(event.headers):
                return int(dict(event.headers)[b"grpc-status"])
        return -1 if any(isinstance(event, StreamReset) for event in mine) else None


P = ParamSpec("P")


def on_a_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Runs an asynchronous test on an event loop of its own."""

    @wraps(test)
    def run(*args: P.args, **named: P.kwargs) -> None:
        asyncio.run(test(*args, **named))

    return run


async def begun(settings: dict[int, int] | None = None, window_bytes: int = WINDOW_BYTES, **limits: int) -> Scene:
    """A scene with the two calls behind it after which others like them repeat."""
    scene = Scene(settings, window_bytes, **limits)
    for _ in range(2):
        stream = scene.call(frame(b"x"))
        await scene.exchange()
        scene.answer(stream)
        await scene.exchange()
    return scene


def begin(scene: Scene, stream: int = FIRST) -> bytes:
    return raw(HEADERS, END_HEADERS, stream, scene.block)


def raw(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return head_of(kind, flags, stream, len(payload)) + payload


def data(payload: bytes, flags: int = END_STREAM, stream: int = FIRST) -> bytes:
    return raw(DATA, flags, stream, payload)


def ends(scene: Scene) -> list[tuple[str, int]]:
    """What was ended, and how: calls answered and reset, and the connection."""
    names = {HEADERS: "answered", RST_STREAM: "reset", GOAWAY: "connection"}
    return [
        (names[kind], stream) for kind, flags, stream, _ in scene.frames() if kind in names and (kind != HEADERS or flags & 1)
    ]
