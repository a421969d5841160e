"""ModelStreamInfer over each transport."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from onnx import TensorProto, helper
from tritonclient.utils import InferenceServerException

from halfserve.protos import inference_pb2 as pb
from tests.models import save_model
from tests.serve.conftest import load_repository
from tests.serve.engine.fakes import HeldBackend, held_model
from tests.serve.running_server import MakeTransport, RunningServer, running_server
from tests.serve.transports.test_under_load import held_request, wait_until_waiting

STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"


def mlp_input(value: float, columns: int = 64) -> triton.InferInput:
    return triton.InferInput("x", (1, columns), "FP16").set_data_from_numpy(np.full((1, columns), value, np.float16))


def stream_stub(channel: grpc.Channel) -> Any:
    return channel.stream_stream(STREAM, pb.ModelInferRequest.SerializeToString, pb.ModelStreamInferResponse.FromString)


def test_tritonclient_streams_and_an_error_does_not_end_it(server: RunningServer) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with triton.InferenceServerClient(server.address) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for number in range(20):
            wrong = number == 7
            client.async_stream_infer("mlp", [mlp_input(number, 63 if wrong else 64)], request_id=str(number))
        received = [answers.get(timeout=60) for _ in range(20)]
        client.stop_stream()
    for number, (result, error) in enumerate(received):
        if number == 7:
            assert isinstance(error, InferenceServerException)
            assert "input 'x' has shape [1, 63], expected [-1, 64]" in str(error)
        else:
            assert error is None
            response = result.get_response()
            assert (response.id, response.parameters["triton_final_response"].bool_param) == (str(number), True)
            assert result.as_numpy("y").shape == (1, 10)


def test_unread_answers_leave_no_stack_trace(
    transport: MakeTransport, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nodes, weights = [helper.make_node("Expand", ["x", "shape"], ["y"])], {"shape": np.array([1, 500_000])}
    path, float32 = tmp_path / "held" / "1" / "model.onnx", TensorProto.FLOAT
    save_model(path, nodes, [("x", float32, ["batch", 1])], [("y", float32, ["batch", 500_000])], weights)
    with running_server(lambda: load_repository(tmp_path), transport) as server:
        for timeout_s in (0.1, None):
            with grpc.insecure_channel(server.address) as channel:
                call = channel.stream_stream(STREAM)(iter([held_request(1).SerializeToString()] * 20), timeout=timeout_s)
                if timeout_s is not None:
                    assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                else:
                    next(call)
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


def test_with_tritons_header_the_first_error_ends_the_stream(transport: MakeTransport) -> None:
    def requests() -> Iterator[pb.ModelInferRequest]:
        for value in (1, -1, 2, 3):
            request = pb.ModelInferRequest(model_name="held", raw_input_contents=[np.float32(value).tobytes()])
            request.inputs.add(name="x", datatype="FP32", shape=[1, 1])
            yield request

    with (
        running_server(lambda: [held_model(HeldBackend(), max_rows=1)], transport) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        answers = stream_stub(channel)(requests(), timeout=60, metadata=[("triton_grpc_error", "true")])
        assert not next(answers).error_message
        with pytest.raises(grpc.RpcError, match="negative values hurt|failed") as failed:
            list(answers)
        assert failed.value.code() == grpc.StatusCode.INTERNAL
        for value in ("false", "True"):
            answers = stream_stub(channel)(requests(), timeout=60, metadata=[("triton_grpc_error", value)])
            assert [bool(answer.error_message) for answer in answers] == [False, True, False, False]


def test_the_asyncio_client_streams(server: RunningServer) -> None:
    async def ask() -> list[str]:
        async def requests() -> AsyncIterator[dict[str, Any]]:
            for number in range(5):
                yield {"model_name": "mlp", "inputs": [mlp_input(number)], "request_id": str(number)}

        async with triton_aio.InferenceServerClient(server.address) as client:
            return [result.get_response().id async for result, _ in client.stream_infer(requests())]

    assert asyncio.run(ask()) == ["0", "1", "2", "3", "4"]


def test_a_stream_without_requests_ends_well(server: RunningServer) -> None:
    with grpc.insecure_channel(server.address) as channel:
        assert list(stream_stub(channel)(iter(()), timeout=60)) == []


def test_many_more_requests_than_may_wait_are_all_answered_in_order(server: RunningServer) -> None:
    def requests() -> Iterator[pb.ModelInferRequest]:
        for number in range(2000):
            request = pb.ModelInferRequest(model_name="mlp", id=str(number), raw_input_contents=[bytes(128)])
            request.inputs.add(name="x", datatype="FP16", shape=[1, 64])
            yield request

    with grpc.insecure_channel(server.address) as channel:
        answers = [answer.infer_response.id for answer in stream_stub(channel)(requests(), timeout=60)]
    assert answers == [str(number) for number in range(2000)]


@pytest.mark.parametrize("name", ["7", "é-7", "😀"])
def test_an_error_names_its_request(server: RunningServer, name: str) -> None:
    with grpc.insecure_channel(server.address) as channel:
        (answer,) = stream_stub(channel)(iter([pb.ModelInferRequest(model_name="nope", id=name)]), timeout=60)
    assert "model 'nope' is not served here" in answer.error_message
    assert answer.infer_response.id == name


def test_what_is_no_request_is_answered_and_the_stream_goes_on(server: RunningServer) -> None:
    with grpc.insecure_channel(server.address) as channel:
        call = channel.stream_stream(STREAM, None, pb.ModelStreamInferResponse.FromString)
        requests = [b"\x1a\xff", pb.ModelInferRequest(model_name="nope", id="7").SerializeToString()]
        answers = list(call(iter(requests), timeout=60))
    assert [answer.infer_response.id for answer in answers] == ["", "7"]


def test_who_finds_a_full_queue_is_told_when_to_come_back(transport: MakeTransport) -> None:
    backend = HeldBackend(held=True)
    with (
        running_server(lambda: [held_model(backend, max_waiting=1)], transport) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        more: queue.Queue[pb.ModelInferRequest | None] = queue.Queue()
        stream = stream_stub(channel)(iter(more.get, None), timeout=60)
        more.put(held_request(1))
        assert backend.entered.wait(60)
        more.put(held_request(2))
        wait_until_waiting(server, 1)
        more.put(held_request(3))
        refused = server.core.models()[0].statistics.totals.fail
        while not server.call(lambda: refused.count):
            pass
        more.put(None)
        backend.release.set()
        answers = list(stream)
    assert [answer.error_message == "" for answer in answers] == [True, True, False]
    told = answers[2].infer_response.parameters
    assert told["grpc-status"].int64_param == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    assert int(told["grpc-retry-pushback-ms"].string_param) >= 1


def test_a_client_that_leaves_the_stream_frees_its_places(transport: MakeTransport) -> None:
    backend = HeldBackend(held=True)
    with (
        running_server(lambda: [held_model(backend)], transport) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        more: queue.Queue[pb.ModelInferRequest] = queue.Queue()
        stream = stream_stub(channel)(iter(more.get, None), timeout=60)
        more.put(held_request(1))
        assert backend.entered.wait(60)
        more.put(held_request(2))
        more.put(held_request(3))
        wait_until_waiting(server, 2)
        stream.cancel()
        wait_until_waiting(server, 0)
        backend.release.set()
        more.put(held_request(4))


def test_the_streams_deadline_holds_for_its_requests(transport: MakeTransport) -> None:
    backend = HeldBackend(held=True)
    with (
        running_server(lambda: [held_model(backend)], transport) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        with pytest.raises(grpc.RpcError) as ended:
            list(stream_stub(channel)(iter([held_request(1), held_request(2)]), timeout=0.2))
        assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        wait_until_waiting(server, 0)
        backend.release.set()
