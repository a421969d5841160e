"""Requests load their models: what waits, what is shared, what is refused."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from halfserve.serve.backends.runtimes import Runtimes
from halfserve.serve.engine.backend import Trust
from halfserve.serve.engine.model_calls import ModelCalls
from halfserve.serve.model_control import load_on_demand
from halfserve.serve.model_control.control_options import ControlMode
from halfserve.serve.transports.nghttp2.server import Nghttp2Server
from tests.models import save_mlp
from tests.serve.backends.python.python_models import save_python_model
from tests.serve.backends.python.test_calls_of_models import CALLS
from tests.serve.backends.python.test_python_models import infer
from tests.serve.ensemble_folders import CHAIN, save_add, save_ensemble
from tests.serve.http.running_http import running_http
from tests.serve.http.tasks.small_text_models import save_text_model
from tests.serve.model_control.controlled import HeldRuntime, ask, controlled_server, lines
from tests.serve.running_server import TRANSPORTS, WAIT_S, MakeTransport, RunningServer

RESTS = ("UNAVAILABLE", "available on demand: the next request loads it")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name in ("mlp", "other"):
        save_mlp(tmp_path / "repository" / name / "1" / "model.onnx")
    return tmp_path / "repository"


@contextmanager
def demand_server(repository: Path, make_transport: MakeTransport = Nghttp2Server, **options: Any) -> Iterator[RunningServer]:
    with controlled_server(repository, ControlMode.NONE, make_transport, on_demand=True, **options) as server:
        yield server


def pin(folder: Path) -> None:
    folder.joinpath("config.pbtxt").write_text('parameters { key: "halfserve.pinned" value { string_value: "on" } }')


@pytest.fixture(params=TRANSPORTS)
def server(repository: Path, request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    with demand_server(repository, TRANSPORTS[request.param]) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.address) as opened:
        yield opened


def refusal(
    client: triton.InferenceServerClient, name: str, timeout_s: float | None = None, timeout_us: int | None = None
) -> tuple[str, str]:
    x = triton.InferInput("x", [1, 64], "FP16").set_data_from_numpy(np.ones((1, 64), np.float16))
    with pytest.raises(InferenceServerException) as refused:
        client.infer(name, [x], client_timeout=timeout_s, timeout=timeout_us)
    return refused.value.status().removeprefix("StatusCode."), refused.value.message()


def figure(server: RunningServer, name: str) -> float:
    return server.call(lambda: figure_here(server, name))


def figure_here(server: RunningServer, name: str) -> float:
    return server.core.figures.readings[f"halfserve_{name}"].read()


def test_requests_share_the_load_of_their_model(server: RunningServer, client: triton.InferenceServerClient) -> None:
    assert lines(server) == [("mlp", "", *RESTS), ("other", "", *RESTS)]
    assert client.is_server_ready()
    assert client.is_model_ready("mlp")  # so that clients that wait for it send their request
    assert lines(server) == [("mlp", "", *RESTS), ("other", "", *RESTS)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: ask(client), range(8)))
    assert answers == [ask(client)] * 8
    assert lines(server) == [("mlp", "1", "READY", ""), ("other", "", *RESTS)]
    assert figure(server, "demand_loads_total") == 1


def test_metadata_and_configuration_load_the_model(server: RunningServer, client: triton.InferenceServerClient) -> None:
    assert [tensor.name for tensor in client.get_model_metadata("mlp").inputs] == ["x"]
    assert client.get_model_config("other").config.name == "other"
    assert lines(server) == [("mlp", "1", "READY", ""), ("other", "1", "READY", "")]


def test_unknown_names_and_versions_load_nothing_more(server: RunningServer, client: triton.InferenceServerClient) -> None:
    assert refusal(client, "../mlp")[0] == refusal(client, "nope")[0] == "NOT_FOUND"
    assert figure(server, "demand_loads_total") == 0
    with pytest.raises(InferenceServerException, match="no version 7"):
        ask(client, "mlp", "7")
    with pytest.raises(InferenceServerException, match="no version 7"):
        ask(client, "mlp", "7")
    assert figure(server, "demand_loads_total") == 1


def test_a_failing_load_is_not_repeated_at_once(
    repository: Path, server: RunningServer, client: triton.InferenceServerClient
) -> None:
    path = repository / "mlp" / "1" / "model.onnx"
    whole = path.read_bytes()
    path.write_bytes(b"this is no model")
    with ThreadPoolExecutor(4) as pool:
        refusals = list(pool.map(lambda _: refusal(client, "mlp"), range(4)))
    assert {code for code, _ in refusals} == {"UNAVAILABLE"}
    assert all("model 'mlp' could not be loaded: " in text and "mlp/1/model.onnx" in text for _, text in refusals)
    assert all("a request in 1 s tries it again" in text for _, text in refusals)
    assert figure(server, "demand_loads_total") == figure(server, "demand_load_failures_total") == 1
    assert not client.is_model_ready("mlp")
    path.write_bytes(whole)
    server.until(lambda: server.core.comes_on_demand("mlp"))
    assert ask(client)
    assert figure(server, "demand_loads_total") == 2


def test_a_request_waits_no_longer_than_its_deadline_and_the_load_goes_on(repository: Path) -> None:
    runtime = HeldRuntime("mlp")
    with demand_server(repository, runtime=runtime) as server, triton.InferenceServerClient(server.address) as client:
        try:
            assert refusal(client, "mlp", timeout_s=0.3)[0] == "DEADLINE_EXCEEDED"
            assert runtime.entered.wait(WAIT_S)
            code, text = refusal(client, "mlp", timeout_us=1000)
            assert (code, "model 'mlp' was still being loaded" in text) == ("DEADLINE_EXCEEDED", True)
            x = triton.InferInput("x", [1, 64], "FP16").set_data_from_numpy(np.ones((1, 64), np.float16))
            cancelled = client.async_infer("mlp", [x], lambda result, error: None)
            server.until(lambda: figure_here(server, "demand_waiting_requests") == 1)
            cancelled.cancel()
            server.until(lambda: figure_here(server, "demand_waiting_requests") == 0)
            assert ask(client, "other")  # is not in the way of others
        finally:
            runtime.release.set()
        assert ask(client)
        assert figure(server, "demand_loads_total") == 2


def test_requests_of_a_stream_keep_their_order(repository: Path) -> None:
    runtime = HeldRuntime("mlp")
    with demand_server(repository, runtime=runtime) as server, triton.InferenceServerClient(server.address) as client:
        answers: queue.Queue[tuple[Any, Exception | None]] = queue.Queue()
        client.start_stream(lambda result, error: answers.put((result, error)))
        x = triton.InferInput("x", [1, 64], "FP16").set_data_from_numpy(np.ones((1, 64), np.float16))
        for number in range(4):
            client.async_stream_infer("mlp", [x], request_id=str(number))
        assert runtime.entered.wait(WAIT_S)
        runtime.release.set()
        got = [answers.get(timeout=WAIT_S) for _ in range(4)]
        assert [(error, result.get_response().id) for result, error in got] == [(None, str(number)) for number in range(4)]


def test_a_drain_fails_the_requests_that_wait(repository: Path) -> None:
    runtime = HeldRuntime("mlp")
    with (
        demand_server(repository, runtime=runtime) as server,
        triton.InferenceServerClient(server.address) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        waiting = pool.submit(refusal, client, "mlp")
        try:
            assert runtime.entered.wait(WAIT_S)
            server.run(server.core.drain())
            code, text = waiting.result(WAIT_S)
        finally:
            runtime.release.set()
        assert (code, "the server is shutting down" in text) == ("UNAVAILABLE", True)


def test_models_that_come_later_are_found(repository: Path) -> None:
    with (
        demand_server(repository, poll_interval_s=0.05) as server,
        triton.InferenceServerClient(server.address) as client,
    ):
        save_mlp(repository / "late" / "1" / "model.onnx")
        server.until(lambda: server.core.comes_on_demand("late"))
        assert ask(client, "late")


def test_a_crowd_of_waiting_requests_is_bounded(
    server: RunningServer, client: triton.InferenceServerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_on_demand, "MOST_WAITING", 0)
    code, text = refusal(client, "mlp")
    assert (code, "requests wait for the load of model 'mlp' already" in text) == ("RESOURCE_EXHAUSTED", True)


def test_an_ensemble_brings_the_models_of_its_steps(tmp_path: Path) -> None:
    save_add(tmp_path / "one", 1)
    save_add(tmp_path / "ten", 10)
    save_ensemble(tmp_path / "chain", CHAIN)
    with (
        controlled_server(tmp_path, ControlMode.EXPLICIT, on_demand=True) as server,
        triton.InferenceServerClient(server.address) as client,
    ):
        x = triton.InferInput("x", [1, 4], "FP32").set_data_from_numpy(np.zeros((1, 4), np.float32))
        assert client.infer("chain", [x]).as_numpy("out").tolist() == [[11] * 4]
        assert [line[:3] for line in lines(server)] == [(name, "1", "READY") for name in ("chain", "one", "ten")]
        client.unload_model("one")
        assert lines(server)[:2] == [("chain", "1", *RESTS), ("one", "1", *RESTS)]
        assert client.infer("chain", [x]).as_numpy("out").tolist() == [[11] * 4]


def test_pinned_models_are_loaded_at_the_start(repository: Path) -> None:
    pin(repository / "other")
    with demand_server(repository) as server:
        assert lines(server) == [("mlp", "", *RESTS), ("other", "1", "READY", "")]


@pytest.mark.parametrize("asks", ["infer", "bytes", "config", "generate"])
def test_requests_by_rest_load_the_model(repository: Path, asks: str) -> None:
    with demand_server(repository) as server, running_http(server) as rest:
        path = f"http://127.0.0.1:{rest.port}/v2/models/mlp"
        with httpx.Client(timeout=WAIT_S) as client:
            assert client.get(f"{path}/ready").status_code == 200
            if asks == "infer":
                tensor = {"name": "x", "shape": [1, 64], "datatype": "FP16", "data": [1.0] * 64}
                answer = client.post(f"{path}/infer", json={"inputs": [tensor]})
            elif asks == "bytes":
                body = np.ones((1, 64), np.float16).tobytes()
                answer = client.post(f"{path}/infer", content=body, headers={"inference-header-content-length": "0"})
            elif asks == "generate":
                answer = client.post(f"{path}/generate", json={"x": [1.0] * 64})
            else:
                answer = client.get(f"{path}/config")
            assert answer.status_code == 200, answer.text
            assert client.post(f"{path.replace('mlp', 'nope')}/infer", json={"inputs": []}).status_code == 404
        assert lines(server) == [("mlp", "1", "READY", ""), ("other", "", *RESTS)]


def test_a_failed_load_is_said_by_rest_too(repository: Path) -> None:
    (repository / "mlp" / "1" / "model.onnx").write_bytes(b"this is no model")
    with demand_server(repository) as server, running_http(server) as rest, httpx.Client(timeout=WAIT_S) as client:
        path = f"http://127.0.0.1:{rest.port}/v2/models/mlp"
        for _ in range(2):  # the second time there is no load
            answer = client.post(f"{path}/infer", json={"inputs": []})
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert "model 'mlp' could not be loaded: " in answer.json()["error"]
        assert client.get(f"{path}/ready").status_code == 503
        assert figure(server, "demand_loads_total") == 1


def test_a_text_request_that_names_its_model_loads_it(tmp_path: Path) -> None:
    save_text_model(tmp_path, "embedder")
    with demand_server(tmp_path) as server, running_http(server) as rest, httpx.Client(timeout=WAIT_S) as client:
        address = f"http://127.0.0.1:{rest.port}"
        refused = client.post(f"{address}/embed", json={"inputs": "a train"})
        assert (refused.status_code, "?model=NAME" in refused.text) == (404, True)
        answer = client.post(f"{address}/v1/embeddings", json={"model": "embedder", "input": "a train"})
        assert answer.status_code == 200, answer.text


def test_calls_of_models_load_the_called_model(tmp_path: Path) -> None:
    save_python_model(tmp_path, "calls", CALLS.replace("NAME", "plus"))
    save_add(tmp_path / "plus", 2, batched=False)
    save_python_model(tmp_path, "lost", CALLS.replace("NAME", "broken"))
    (tmp_path / "broken" / "1").mkdir(parents=True)
    (tmp_path / "broken" / "1" / "model.onnx").write_bytes(b"this is no model")
    runtimes = Runtimes(trust=Trust(python_models=True))
    with demand_server(tmp_path, runtime=runtimes) as server, triton.InferenceServerClient(server.address) as client:
        server.call(lambda: runtimes.connect(ModelCalls(server.core)))
        assert infer(client, "calls", np.zeros(4, np.float32)).tolist() == [3] * 4
        for _ in range(2):  # the second time there is no load
            with pytest.raises(InferenceServerException, match="model 'broken' could not be loaded: .*is not"):
                infer(client, "lost", np.zeros(4, np.float32))


def test_a_server_that_needs_all_models_is_ready_without_those_on_demand(repository: Path) -> None:
    with demand_server(repository) as server, triton.InferenceServerClient(server.address) as client:
        server.core.needs_all_models = True
        assert client.is_server_ready()
        assert ask(client)
