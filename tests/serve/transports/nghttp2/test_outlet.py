from __future__ import annotations

import asyncio
from typing import cast

import pytest
from ngh2 import Connection, Event, Role, StreamReset

from serve.security.memory_budget import DEFAULT_BYTES, MemoryBudget
from serve.transports.grpc_headers import OK_TRAILERS, RESPONSE
from serve.transports.nghttp2.outlet import Outlet
from tests.serve.transports.nghttp2.http2_peer import call_headers

MAX_UNSENT = 1000
LARGE = bytes(100_000)  # more than the window that a client opens a stream with


class Wire(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))


class Scene:
    """A client that has begun a call and has not ended it, and the server's side of its connection."""

    def __init__(self) -> None:
        self.client, self.server, self.wire = Connection(Role.CLIENT), Connection(Role.SERVER), Wire()
        self.client.initiate_connection()
        self.server.initiate_connection()
        self.stream = self.client.send_request(call_headers())
        self.server.receive_data(self.client.data_to_send())
        self.server.events()
        self.outlet = Outlet(self.server, MAX_UNSENT, lambda last: last, MemoryBudget(DEFAULT_BYTES).share(is_known=True))

    def answer(self, message: bytes) -> None:
        self.server.send_response(self.stream, RESPONSE)
        self.server.send_data(self.stream, message)
        self.server.send_trailers(self.stream, OK_TRAILERS)

    def write(self) -> list[Event]:
        """Write, let the client read all that its window has let through and open it again; return what it met."""
        self.outlet.write(cast("asyncio.Transport", self.wire))
        for data in self.wire.written:
            self.client.receive_data(data)
        self.wire.written.clear()
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
    scene.outlet.paused = True
    assert scene.write() == []
    scene.outlet.paused = False
    assert scene.write() != []


def test_a_stream_is_reset_once_its_answer_has_left_and_not_before(scene: Scene) -> None:
    scene.outlet.reset_when_out(scene.stream)
    scene.answer(LARGE)
    assert not is_reset(scene.write())  # the window has let a part through
    assert is_reset(scene.write())


def test_who_waits_for_a_slow_client_is_called_once_when_it_has_read(scene: Scene) -> None:
    called: list[int] = []
    scene.answer(LARGE)
    assert scene.outlet.is_behind(scene.stream)
    scene.outlet.when_read(scene.stream, lambda: called.append(1))
    scene.write()
    assert (called, scene.outlet.is_behind(scene.stream)) == ([], True)
    scene.write()
    scene.write()
    assert (called, scene.outlet.is_behind(scene.stream)) == ([1], False)


@pytest.mark.parametrize("end", ["stream", "connection"])
def test_nobody_is_called_for_what_is_over(scene: Scene, end: str) -> None:
    called: list[int] = []
    scene.outlet.when_read(scene.stream, lambda: called.append(1))
    if end == "stream":
        scene.outlet.closed(scene.stream)
    else:
        scene.outlet.clear()
    scene.write()
    assert called == []
