"""Deadlines, cancellation, a full queue and draining, seen by a client over the real transport."""

from __future__ import annotations

import asyncio
import re
import threading
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import text_format
from grpc_health.v1 import health_pb2, health_pb2_grpc

from halfserve.protos import inference_pb2 as pb
from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.engine.queueing.pace import CONFIDENT
from halfserve.serve.transports.grpc_framing import frame
from tests.serve.engine.fakes import HeldBackend, held_model
from tests.serve.running_server import MakeTransport, RunningServer, running_server
from tests.serve.transports.nghttp2.http2_peer import call_headers, peer

SERVICE = "/inference.GRPCInferenceService/"


def infer_stub(channel: grpc.Channel) -> Any:
    return channel.unary_unary(SERVICE + "ModelInfer", pb.ModelInferRequest.SerializeToString, pb.ModelInferResponse.FromString)


def is_ready(channel: grpc.Channel) -> bool:
    ask = channel.unary_unary(SERVICE + "ServerReady", response_deserializer=pb.ServerReadyResponse.FromString)
    return bool(ask(b"", timeout=60).ready)


def held_request(value: float) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="held", raw_input_contents=[np.float32(value).tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 1])
    return request


def test_a_deadline_counts_from_the_beginning_of_the_request(transport: MakeTransport) -> None:
    backend = HeldBackend()
    with running_server(lambda: [held_model(backend)], transport) as server, peer(server) as slow:
        message = frame(held_request(1).SerializeToString())
        stream = slow.http2.send_request(call_headers(grpc_timeout=b"150m"))
        slow.http2.send_data(stream, message[:20])
        slow.push()
        begun_s = server.call(clock)
        while server.call(clock) < begun_s + 0.2:
            pass
        slow.http2.send_data(stream, message[20:], end_stream=True)
        slow.push()
        assert slow.status(stream)[0] == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
        assert backend.batches == []


def clock() -> float:
    return asyncio.get_running_loop().time()


def test_a_request_that_waits_longer_than_its_timeout_allows_is_not_computed(transport: MakeTransport) -> None:
    backend = HeldBackend(held=True)
    with running_server(lambda: [held_model(backend)], transport) as server, grpc.insecure_channel(server.address) as channel:
        stub = infer_stub(channel)
        occupying = stub.future(held_request(1))
        assert backend.entered.wait(60)
        late = held_request(2)
        late.parameters["timeout"].int64_param = 1
        expired, good = stub.future(late), stub.future(held_request(3))
        with pytest.raises(grpc.RpcError) as refused:
            expired.result(60)
        wait_until_waiting(server, 1)
        backend.release.set()
        assert refused.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "in the queue, longer than its timeout allows; it was not computed" in refused.value.details()
        assert np.frombuffer(good.result(60).raw_output_contents[0], np.float32).tolist() == [4]
        occupying.result(60)
        assert backend.batches == [[1], [3]]


def test_a_queue_policys_timeout_bounds_the_wait_and_not_the_answer(transport: MakeTransport) -> None:
    backend = HeldBackend(held=True)
    text = "max_batch_size: 8 dynamic_batching { default_queue_policy { default_timeout_microseconds: 30000000 } }"
    config = text_format.Parse(text, ModelConfig())
    with (
        running_server(lambda: [held_model(backend, config=config)], transport) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        stub = infer_stub(channel)
        occupying = stub.future(held_request(1), timeout=60)
        assert backend.entered.wait(60)
        server.call(partial(learn_that_batches_take, 300.0, server))
        answers = [stub.future(held_request(value)) for value in (2, 3)]
        wait_until_waiting(server, 2)
        backend.release.set()
        for answer in [occupying, *answers]:
            answer.result(60)
        assert backend.batches == [[1], [2, 3]]


def test_a_client_that_goes_away_frees_its_place(transport: MakeTransport) -> None:
    backend = HeldBackend(held=True)
    with running_server(lambda: [held_model(backend)], transport) as server, grpc.insecure_channel(server.address) as channel:
        stub = infer_stub(channel)
        occupying = stub.future(held_request(1))
        assert backend.entered.wait(60)
        gone, good = stub.future(held_request(2)), stub.future(held_request(3))
        wait_until_waiting(server, 2)
        gone.cancel()
        wait_until_waiting(server, 1)
        backend.release.set()
        assert np.frombuffer(good.result(60).raw_output_contents[0], np.float32).tolist() == [4]
        occupying.result(60)
        assert backend.batches == [[1], [3]]


@pytest.mark.parametrize(
    ("bound", "says"),
    [({"max_waiting": 1}, r"is full \(1 requests wait\)"), ({"max_waiting_bytes": 1}, r"is full \(requests of 0 MiB wait, of")],
    ids=["requests", "bytes"],
)
def test_a_full_queue_is_resource_exhausted_with_a_retry_hint(
    transport: MakeTransport, bound: dict[str, Any], says: str
) -> None:
    backend = HeldBackend(held=True)
    with (
        running_server(lambda: [held_model(backend, **bound)], transport) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        stub = infer_stub(channel)
        first = stub.future(held_request(1))
        assert backend.entered.wait(60)
        second = stub.future(held_request(2))
        wait_until_waiting(server, 1)
        with pytest.raises(grpc.RpcError) as refused:
            stub(held_request(3), timeout=60)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert re.search(says, refused.value.details())
        assert int(dict(refused.value.trailing_metadata())["grpc-retry-pushback-ms"]) >= 1
        backend.release.set()
        first.result(60)
        second.result(60)


def test_a_deadline_that_the_queue_is_too_long_for_brings_no_retries(transport: MakeTransport) -> None:
    backend = HeldBackend(held=True)
    with (
        running_server(lambda: [held_model(backend, max_rows=1)], transport) as server,
        grpc.insecure_channel(server.address) as channel,
        peer(server) as hurried,
    ):
        first = infer_stub(channel).future(held_request(1), timeout=60)
        assert backend.entered.wait(60)
        server.call(partial(learn_that_batches_take, 0.001, server))
        begun_s = server.call(clock)
        while server.call(clock) < begun_s + 0.2:  # the first is overdue by more than the second has
            pass
        stream = hurried.call(frame(held_request(2).SerializeToString()), grpc_timeout=b"100m")
        assert hurried.status(stream)[0] == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
        assert "grpc-retry-pushback-ms" not in str(hurried.events)
        backend.release.set()
        first.result(60)
        assert backend.batches == [[1]]


def learn_that_batches_take(seconds: float, server: RunningServer) -> None:
    pace = server.core.models()[0].batcher._queue.pace
    assert pace is not None
    for _ in range(CONFIDENT):
        pace.observe((1,), 1, seconds)


def wait_until_waiting(server: RunningServer, count: int) -> None:
    """Ask the server until its queue holds `count` requests; each question is a turn of its event loop."""
    model = server.core.models()[0]
    server.until(lambda: model.batcher.waiting == count)


def test_a_draining_server_tells_its_watchers_and_refuses_new_work(transport: MakeTransport) -> None:
    backend = HeldBackend(held=True)
    with running_server(lambda: [held_model(backend)], transport) as server, grpc.insecure_channel(server.address) as channel:
        watched = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
        assert next(watched).status == health_pb2.HealthCheckResponse.SERVING
        stub = infer_stub(channel)
        running = stub.future(held_request(1))
        assert backend.entered.wait(60)
        draining = threading.Thread(target=server.run, args=(server.core.drain(),))
        draining.start()
        assert next(watched).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.RpcError) as refused:
            stub(held_request(2), timeout=60)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not is_ready(channel)
        backend.release.set()
        assert np.frombuffer(running.result(60).raw_output_contents[0], np.float32).tolist() == [2]
        draining.join(60)


def test_the_more_urgent_request_overtakes(transport: MakeTransport) -> None:
    backend = HeldBackend(held=True)
    config = text_format.Parse("max_batch_size: 1 dynamic_batching { priority_levels: 2 }", ModelConfig())
    with (
        running_server(lambda: [held_model(backend, config=config, max_rows=1, levels=2)], transport) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        stub = infer_stub(channel)
        running = stub.future(held_request(1))
        assert backend.entered.wait(60)
        patient, urgent = held_request(2), held_request(3)
        urgent.parameters["priority"].uint64_param = 1
        answers = [running, stub.future(patient)]
        wait_until_waiting(server, 1)
        answers.append(stub.future(urgent))
        wait_until_waiting(server, 2)
        backend.release.set()
        for answer in answers:
            answer.result(60)
        assert backend.batches == [[1], [3], [2]]
        urgent.parameters["priority"].uint64_param = 3
        stub(urgent, timeout=60)  # no such priority: the model's default, as in Triton
