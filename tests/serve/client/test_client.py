"""Both clients against a server, against both transports, and closed while other threads use them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halfserve import (
    AsyncClient,
    Cancelled,
    Client,
    ClientError,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    RetryPolicy,
    ServerUnavailable,
)
from halfserve.protos import inference_pb2 as pb
from halfserve.protos.datatypes import DATATYPES
from halfserve.serve.client.channel_settings import ChannelSettings
from halfserve.serve.transports.grpcio_server import GrpcioServer
from tests.models import mlp_weights
from tests.serve.client.conftest import Connect
from tests.serve.client.scripted_server import Failure, ScriptedServer
from tests.serve.conftest import load_repository
from tests.serve.running_server import RunningServer, running_server

WAIT_S = 60.0
FULL = Failure("RESOURCE_EXHAUSTED", "full", (("grpc-retry-pushback-ms", "600000"),))
X = np.random.default_rng(4).standard_normal((3, 64)).astype(np.float16)


def rows(count: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(7).standard_normal((count, 64)).astype(np.float16)


def answer(*values: float) -> pb.ModelInferResponse:
    response = pb.ModelInferResponse(model_name="m", raw_output_contents=[np.array(values, np.float32).tobytes()])
    response.outputs.add(name="y", datatype="FP32", shape=[len(values)])
    return response


def test_infer_returns_the_models_outputs(server: RunningServer, connect: Connect) -> None:
    x = rows(5)
    first, second = (w.astype(np.float32) for w in mlp_weights())
    outputs = connect(server.address).infer(
        "mlp", {"x": x}, version="3", outputs=["y"], request_id="a", parameters={"priority": 0}
    )
    assert list(outputs) == ["y"]
    assert outputs["y"].dtype == np.float16
    np.testing.assert_allclose(outputs["y"], np.maximum(x.astype(np.float32) @ first, 0) @ second, atol=2e-2)
    outputs["y"][0, 0] = 1  # the caller's own


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"inputs": rows(1)}, "inputs must be arrays by name, such as {'x': array}, not ndarray"),
        ({"version": 1}, "the version of model 'mlp' must be text, not 1"),
        ({"model": 5}, "a model's name must be text, not 5"),
        ({"request_id": 5}, "request_id must be text, not 5"),
        ({"timeout_s": "5"}, "timeout_s must be seconds above 0, or None for no limit, not '5'"),
    ],
)
@pytest.mark.parametrize("known", [True, False])
def test_arguments_of_the_wrong_type_are_refused(
    server: RunningServer, connect: Connect, changes: dict[str, Any], text: str, known: bool
) -> None:
    client = connect(server.address)
    if known:
        client.infer("mlp", {"x": rows(1)})
    with pytest.raises(InvalidRequest, match=text):
        client.infer(**{"model": "mlp", "inputs": {"x": rows(1)}, **changes})
    answers = client.stream_infer("mlp", [rows(1), {"x": rows(1)}])  # type: ignore[list-item]
    assert [answer.error is None for answer in answers] == [False, True]


def test_a_timeout_may_be_infinite(server: RunningServer, connect: Connect) -> None:
    for timeout_s in (float("inf"), 1e12):
        assert connect(server.address, timeout_s=timeout_s).infer("mlp", {"x": rows(1)}, timeout_s=timeout_s)
        assert next(connect(server.address).stream_infer("mlp", [{"x": rows(1)}], timeout_s=timeout_s)).error is None


def test_every_datatype_round_trips(server: RunningServer, connect: Connect) -> None:
    sent: dict[str, np.ndarray[Any, Any]] = {}
    for row in DATATYPES:
        if row.numpy is not None:
            values = [[b"a", "\0h\u00e9".encode()]] if row.wire == "BYTES" else [[0, 1]]
            sent[row.wire] = np.array(values, row.numpy)
    outputs = connect(server.address).infer("echo_types", {f"in_{wire}": array for wire, array in sent.items()})
    assert outputs.keys() == {f"out_{wire}" for wire in sent}
    for wire, array in sent.items():
        np.testing.assert_array_equal(outputs[f"out_{wire}"], array, strict=True)
        assert outputs[f"out_{wire}"].flags.writeable


def test_another_dtype_is_refused_and_nothing_is_sent(scripted: ScriptedServer, connect: Connect) -> None:
    scripted.serve_model("FP16")
    with pytest.raises(
        InvalidRequest, match=r"input 'x' of model 'm' takes FP16, but the array is float32; .*astype\(np.float16\)"
    ):
        connect(scripted.address).infer("m", {"x": np.zeros((1, 2), np.float32)})
    assert scripted.count("ModelInfer") == 0


def test_the_servers_message_reaches_the_caller(server: RunningServer, connect: Connect) -> None:
    client = connect(server.address)
    with pytest.raises(InvalidRequest, match="x.*64") as wrong_shape:
        client.infer("mlp", {"x": rows(1)[:, :5]})
    assert wrong_shape.value.code == "INVALID_ARGUMENT"
    with pytest.raises(ModelNotFound, match="nope"):
        client.infer("nope", {"x": rows(1)})
    with pytest.raises(ModelNotFound, match="2"):
        client.infer("mlp", {"x": rows(1)}, version="2")
    with pytest.raises(InvalidRequest, match="has no input 'z'; its inputs are: x"):
        client.infer("mlp", {"z": rows(1)})


def test_server_and_model_metadata_are_returned(server: RunningServer, connect: Connect) -> None:
    client = connect(server.address)
    assert client.is_live()
    assert client.is_ready()
    assert client.is_ready("mlp", "3")
    assert not client.is_ready("nope")
    assert "statistics" in client.server_metadata().extensions
    assert {("mlp", "1", "READY"), ("mlp", "3", "READY")} <= {(m.name, m.version, m.state) for m in client.models()}
    assert list(client.model_metadata("mlp").inputs[0].shape) == [-1, 64]
    assert client.model_config("mlp").max_batch_size == 16


def test_metadata_is_asked_for_once(scripted: ScriptedServer, connect: Connect) -> None:
    scripted.serve_model()
    scripted.answers["ModelInfer"] = [answer(1), answer(2)]
    client = connect(scripted.address)
    values = [client.infer("m", {"x": [[1, 2]]})["y"].tolist() for _ in range(2)]
    assert values == [[1.0], [2.0]]
    assert scripted.count("ModelMetadata") == 1


def test_the_timeout_is_the_deadline_of_the_call(scripted: ScriptedServer, connect: Connect) -> None:
    scripted.answers["ServerMetadata"] = [pb.ServerMetadataResponse(name="s")]
    scripted.answers["ModelInfer"] = [answer(1)]
    client = connect(scripted.address, timeout_s=12)
    client.server_metadata()
    client.infer_message(pb.ModelInferRequest(), timeout_s=100)
    allowed = [remaining for _, _, remaining in scripted.calls]
    assert allowed[0] == pytest.approx(12, abs=2)
    assert allowed[1] == pytest.approx(100, abs=2)


def test_no_answer_in_time(scripted: ScriptedServer, connect: Connect) -> None:
    scripted.answers["ModelInfer"] = [answer(1)]
    scripted.held.add("ModelInfer")
    with pytest.raises(DeadlineExceeded, match=r"did not answer ModelInfer within 0.2 s; allow more time"):
        connect(scripted.address).infer_message(pb.ModelInferRequest(), timeout_s=0.2)


def test_overload_carries_the_servers_retry_hint(scripted: ScriptedServer, connect: Connect) -> None:
    scripted.answers["ModelInfer"] = [Failure("RESOURCE_EXHAUSTED", "the queue is full", (("grpc-retry-pushback-ms", "250"),))]
    with pytest.raises(Overloaded, match="^the queue is full$") as full:
        connect(scripted.address).infer_message(pb.ModelInferRequest())
    assert full.value.retry_after_s == 0.25
    assert scripted.count("ModelInfer") == 1


@pytest.mark.parametrize("code", ["UNAVAILABLE", "RESOURCE_EXHAUSTED"])
def test_retries_when_asked_to(scripted: ScriptedServer, connect: Connect, code: str) -> None:
    hint = (("grpc-retry-pushback-ms", "1"),)
    scripted.answers["ModelInfer"] = [Failure(code, "busy", hint), Failure(code, "busy", hint), answer(5)]
    response = connect(scripted.address, retries=2).infer_message(pb.ModelInferRequest())
    assert response.raw_output_contents[0] == np.float32(5).tobytes()
    assert scripted.count("ModelInfer") == 3


def test_an_invalid_request_is_never_retried(scripted: ScriptedServer, connect: Connect) -> None:
    scripted.answers["ModelInfer"] = [Failure("INVALID_ARGUMENT", "no")]
    with pytest.raises(InvalidRequest, match="^no$"):
        connect(scripted.address, retries=4).infer_message(pb.ModelInferRequest())
    assert scripted.count("ModelInfer") == 1


def test_no_server_at_the_address(connect: Connect) -> None:
    client = connect("127.0.0.1:1")
    with pytest.raises(ServerUnavailable, match=r"^no server answers at 127.0.0.1:1 \(connection refused\); start one with"):
        client.models()
    assert not client.is_live()
    assert not client.is_ready()


def test_a_closed_client_refuses_calls(server: RunningServer, connect: Connect) -> None:
    client = connect(server.address)
    assert client.is_live()
    client.close()
    client.close()
    with pytest.raises(ClientError, match="this client is closed") as closed:
        client.models()
    assert closed.value.code == "CANCELLED"


@dataclass(frozen=True, kw_only=True)
class Observed(RetryPolicy):
    """Tells when a client is about to pause."""

    pauses: threading.Event = field(default_factory=threading.Event)

    def pause_s(self, attempt: int, hint_s: float | None) -> float:
        self.pauses.set()
        return super().pause_s(attempt, hint_s)


def test_a_call_that_waits_to_be_repeated_ends(scripted: ScriptedServer) -> None:
    scripted.answers["ServerMetadata"], policy = [FULL], Observed()
    client = Client(scripted.address, timeout_s=None, retries=policy)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(client.server_metadata)
        assert policy.pauses.wait(WAIT_S)
        client.close()
        with pytest.raises(Cancelled, match="this client is closed"):
            waits.result(WAIT_S)


def test_an_asyncio_call_that_waits_to_be_repeated_ends(scripted: ScriptedServer) -> None:
    scripted.answers["ServerMetadata"], policy = [FULL], Observed()

    async def ask() -> None:
        client = AsyncClient(scripted.address, timeout_s=None, retries=policy)
        waits = asyncio.create_task(client.server_metadata())
        assert await asyncio.to_thread(policy.pauses.wait, WAIT_S)
        await client.close()
        with pytest.raises(Cancelled, match="this client is closed"):
            await asyncio.wait_for(waits, WAIT_S)

    asyncio.run(ask())


def test_nothing_is_opened_once_a_client_is_closed(scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted.answers["ServerMetadata"] = [pb.ServerMetadataResponse(name="s")]
    opens, closed, opened, really_open = threading.Event(), threading.Event(), [], ChannelSettings.open

    def slowly(settings: ChannelSettings, kind: Any) -> Any:
        opens.set()
        assert closed.wait(WAIT_S)
        opened.append(really_open(settings, kind))
        return opened[0]

    monkeypatch.setattr(ChannelSettings, "open", slowly)
    client = Client(scripted.address)
    with ThreadPoolExecutor(1) as pool:
        asks = pool.submit(client.server_metadata)
        assert opens.wait(WAIT_S)
        client.close()
        closed.set()
        with pytest.raises(Cancelled, match="this client was closed"):
            asks.result(WAIT_S)
    with pytest.raises(ValueError, match="closed channel"):
        opened[0].unary_unary("/any")(b"")


@pytest.fixture(scope="module")
def reference(repository: Path) -> Iterator[RunningServer]:
    """The server on grpcio."""
    with running_server(lambda: load_repository(repository), GrpcioServer) as running:
        yield running


def test_both_transports_answer_alike(reference: RunningServer, server: RunningServer, connect: Connect) -> None:
    ours, theirs = (connect(one.address).infer("mlp", {"x": X})["y"] for one in (server, reference))
    np.testing.assert_array_equal(ours, theirs)
