"""What a call held is freed with the call: the garbage collector looks seldom, and it may be megabytes."""

from __future__ import annotations

import gc
import queue
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from protos import inference_pb2 as pb
from serve.engine.requests import InferRequest
from serve.protocol.inference_stream import InferenceStream
from serve.transports.nghttp2.server import Nghttp2Server
from serve.transports.nghttp2.streams import InferStreamCall
from serve.transports.nghttp2.unary import InferCall
from tests.serve.engine.fakes import HeldBackend, held_model
from tests.serve.running_server import RunningServer, running_server
from tests.serve.transports.test_infer_stream import stream_stub
from tests.serve.transports.test_under_load import held_request, infer_stub, wait_until_waiting

WAIT_S = 20.0
OF_CALLS = (InferCall, InferStreamCall, InferenceStream, InferRequest)

Scene = Callable[[RunningServer, grpc.Channel, HeldBackend], object]


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive() -> list[type[Any]]:
    return [type(one) for one in gc.get_objects() if type(one) in OF_CALLS]


def cancelled(server: RunningServer, channel: grpc.Channel, backend: HeldBackend) -> object:
    stub = infer_stub(channel)
    computed = stub.future(held_request(1))
    assert backend.entered.wait(WAIT_S)
    calls = [computed, *(stub.future(held_request(value)) for value in (2, 3))]
    wait_until_waiting(server, 2)
    for call in calls:
        call.cancel()
    wait_until_waiting(server, 0)
    return calls


def cut_off(server: RunningServer, channel: grpc.Channel, backend: HeldBackend) -> object:
    stub = infer_stub(channel)
    computed = stub.future(held_request(1))
    assert backend.entered.wait(WAIT_S)
    calls = [computed, stub.future(held_request(2))]
    wait_until_waiting(server, 1)
    channel.close()
    wait_until_waiting(server, 0)
    return calls


def too_late(_: RunningServer, channel: grpc.Channel, __: HeldBackend) -> object:
    stub = infer_stub(channel)
    calls = [stub.future(held_request(value), timeout=0.2) for value in (1, 2)]
    assert {call.code() for call in calls} == {grpc.StatusCode.DEADLINE_EXCEEDED}
    return calls


def refused(_: RunningServer, channel: grpc.Channel, backend: HeldBackend) -> object:
    backend.release.set()
    request = held_request(1)
    request.inputs[0].shape[:] = [1, 2]
    call = infer_stub(channel).future(request)
    assert call.code() is grpc.StatusCode.INVALID_ARGUMENT
    return None


def stream_left(server: RunningServer, channel: grpc.Channel, backend: HeldBackend) -> object:
    more: queue.Queue[pb.ModelInferRequest | None] = queue.Queue()
    stream = stream_stub(channel)(iter(more.get, None), timeout=WAIT_S)
    more.put(held_request(1))
    assert backend.entered.wait(WAIT_S)
    for value in (2, 3):
        more.put(held_request(value))
    wait_until_waiting(server, 2)
    stream.cancel()
    wait_until_waiting(server, 0)
    more.put(None)
    return stream


def stream_ended(_: RunningServer, channel: grpc.Channel, backend: HeldBackend) -> object:
    backend.release.set()
    assert len(list(stream_stub(channel)(iter([held_request(1), held_request(-1)]), timeout=WAIT_S))) == 2
    return None


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("scene", [cancelled, cut_off, too_late, refused, stream_left, stream_ended])
def test_nothing_is_left_of_a_call(scene: Scene) -> None:
    backend = HeldBackend(held=True)
    with running_server(lambda: [held_model(backend)], Nghttp2Server) as server:
        with grpc.insecure_channel(server.address) as channel:
            try:
                scene(server, channel, backend)
            finally:
                backend.release.set()
        until = time.monotonic() + WAIT_S
        while alive() and time.monotonic() < until:
            server.call(lambda: None)  # a turn of its loop, in which what is under way goes on
        assert alive() == []
