"""Sequences over the wire: tritonclient against a real server, reloads under load, metrics."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from halfserve.serve.http.http_options import HttpOptions
from halfserve.serve.model_control.control_options import ControlMode
from halfserve.serve.observability.exposition import exposition
from tests.serve.conftest import load_repository
from tests.serve.engine.sequences.scene import SUM, save_sum, sum_model
from tests.serve.http.running_http import running_http
from tests.serve.model_control.controlled import controlled_server
from tests.serve.running_server import TRANSPORTS, WAIT_S, RunningServer, running_server
from tests.serve.runtimes import RUNTIMES

MANY = SUM.replace("oldest { }", "oldest { max_candidate_sequences: 100 }")


@pytest.fixture(scope="module", params=[("nghttp2", "onnx_runtime"), ("grpcio", "onnx_runtime"), ("nghttp2", "openvino")])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = sum_model(tmp_path_factory.mktemp("sequences"), MANY)
    transport, runtime = request.param
    with running_server(lambda: load_repository(root, RUNTIMES[runtime]()), TRANSPORTS[transport]) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[Any]:
    with triton.InferenceServerClient(server.address) as client:
        yield client


def inputs(x: float, module: Any = triton) -> list[Any]:
    tensor = module.InferInput("x", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.full((1, 1), x, np.float32))
    return [tensor]


def step(client: Any, key: int | str, x: float, *, start: bool = False, end: bool = False) -> float:
    answer = client.infer("sum", inputs(x), sequence_id=key, sequence_start=start, sequence_end=end, client_timeout=WAIT_S)
    return float(answer.as_numpy("y")[0, 0])


def test_metadata_and_configuration_are_as_tritons(client: Any) -> None:
    metadata = client.get_model_metadata("sum")
    assert ([entry.name for entry in metadata.inputs], [entry.name for entry in metadata.outputs]) == (["x"], ["y"])
    config = client.get_model_config("sum").config
    assert config.WhichOneof("scheduling_choice") == "sequence_batching"
    assert config.sequence_batching.oldest.max_candidate_sequences == 100
    assert [state.input_name for state in config.sequence_batching.state] == ["total"]


@pytest.mark.parametrize("key", [9, 2**63 - 1, "a text", "é" * 64])
def test_ids_are_numbers_and_texts(client: Any, key: int | str) -> None:
    assert [step(client, key, x, start=x == 1, end=x == 3) for x in (1, 2, 3)] == [1, 3, 6]


def test_a_request_without_a_start_is_an_invalid_argument(client: Any) -> None:
    with pytest.raises(InferenceServerException, match="sequence 404 of model 'sum' is not running") as refusal:
        step(client, 404, 1)
    assert refusal.value.status() == "StatusCode.INVALID_ARGUMENT"
    with pytest.raises(InferenceServerException, match="'sequence_id'"):
        client.infer("sum", inputs(1))
    tensor = triton.InferInput("x", [2, 1], "FP32")
    tensor.set_data_from_numpy(np.ones((2, 1), np.float32))
    with pytest.raises(InferenceServerException, match="the batch size is 2, expected 1"):
        client.infer("sum", [tensor], sequence_id=405, sequence_start=True)


def test_many_sequences_share_one_stream(client: Any) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    keys: Sequence[int | str] = [*range(1, 41), *(f"text {number}" for number in range(40))]
    for x in range(1, 6):
        for place, key in enumerate(keys):
            client.async_stream_infer(
                "sum", inputs(x + place % 7), request_id=f"{place}", sequence_id=key, sequence_start=x == 1, sequence_end=x == 5
            )
    totals: dict[int, list[float]] = {}
    for _ in range(5 * len(keys)):
        result, error = answers.get(timeout=WAIT_S)
        assert error is None
        totals.setdefault(int(result.get_response().id), []).append(float(result.as_numpy("y")[0, 0]))
    client.stop_stream()
    for place in range(len(keys)):
        assert totals[place] == np.cumsum([x + place % 7 for x in range(1, 6)]).tolist()


def test_a_stream_that_ends_leaves_its_sequences_to_others(server: RunningServer, client: Any) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with triton.InferenceServerClient(server.address) as other:
        other.start_stream(lambda result, error: answers.put((result, error)))
        other.async_stream_infer("sum", inputs(5), sequence_id=70, sequence_start=True)
        assert answers.get(timeout=WAIT_S)[1] is None
        other.stop_stream(cancel_requests=True)
    assert step(client, 70, 6) == 11  # a client may continue over another connection


def test_metrics_count_sequences(server: RunningServer, client: Any) -> None:
    step(client, 80, 1, start=True)
    text = server.run(exposition(server.core))[0].decode()
    active = next(line for line in text.splitlines() if line.startswith("halfserve_sequences_active{"))
    assert int(active.split()[-1]) >= 1
    assert 'halfserve_sequences_waiting{model="sum",version="1"} 0' in text
    assert 'halfserve_sequence_requests_waiting{model="sum",version="1"} 0' in text
    assert "halfserve_sequences_expired_total{" in text


def test_sequences_over_http(tmp_path: Path) -> None:
    sum_model(tmp_path, MANY)
    with (
        controlled_server(tmp_path, ControlMode.NONE) as server,
        running_http(server, HttpOptions(port=0)) as rest,
        triton_http.InferenceServerClient(f"127.0.0.1:{rest.port}") as client,
    ):
        for key in (5, "five"):
            answers = [
                client.infer("sum", inputs(x, triton_http), sequence_id=key, sequence_start=x == 1, sequence_end=x == 3)
                for x in (1, 2, 3)
            ]
            assert [float(answer.as_numpy("y")[0, 0]) for answer in answers] == [1, 3, 6]


@pytest.fixture
def reloading(tmp_path: Path) -> Iterator[tuple[RunningServer, Path]]:
    with controlled_server(sum_model(tmp_path, MANY), ControlMode.EXPLICIT) as server:
        server.run(server.core.load("sum"))
        yield server, tmp_path


def test_running_sequences_end_on_the_version_that_they_began_on(reloading: tuple[RunningServer, Path]) -> None:
    server, root = reloading
    with triton.InferenceServerClient(server.address) as client:
        assert step(client, 1, 1, start=True) == 1
        save_sum(root / "sum" / "2" / "model.onnx", factor=100)
        server.run(server.core.load("sum"))
        assert step(client, 2, 1, start=True) == 100  # the new version
        assert [step(client, 1, 2), step(client, 1, 3, end=True)] == [3, 6]
        assert step(client, 1, 1, start=True) == 100
        server.run(server.core.unload("sum"))
        with pytest.raises(InferenceServerException, match="model 'sum' is not served now"):
            step(client, 2, 1)


def test_an_unload_does_not_wait_for_idle_sequences(reloading: tuple[RunningServer, Path]) -> None:
    server, root = reloading
    with triton.InferenceServerClient(server.address) as client:
        step(client, 1, 1, start=True)
        for factor in (2, 3):  # two reloads: the first version's sequences are given up
            save_sum(root / "sum" / "1" / "model.onnx", factor=factor)
            server.run(server.core.load("sum"))
        with pytest.raises(InferenceServerException, match="sequence 1 of model 'sum' is not running"):
            step(client, 1, 1)
        server.run(server.core.unload("sum"))


@pytest.mark.long
def test_reloads_under_load_fail_no_request(reloading: tuple[RunningServer, Path]) -> None:
    server, root = reloading
    stop, news = threading.Event(), threading.Condition()
    done = dict.fromkeys(range(1, 5), 0)

    def converse(key: int) -> None:
        """Sequences of four requests, one after the other."""
        with triton.InferenceServerClient(server.address) as client:
            while not stop.is_set():
                answers = [step(client, key, x, start=x == 1, end=x == 4) for x in (1, 2, 3, 4)]
                factor = answers[0]  # of the version that the sequence began on
                assert answers == [factor, 3 * factor, 6 * factor, 10 * factor]
                with news:
                    done[key] += 1
                    news.notify()

    def are_beyond(before: dict[int, int]) -> bool:
        return all(done[key] >= before[key] + 2 for key in done)

    with ThreadPoolExecutor(len(done)) as threads:
        running = [threads.submit(converse, key) for key in done]
        try:
            for factor in range(2, 6):
                save_sum(root / "sum" / str(factor) / "model.onnx", factor=factor)
                server.run(server.core.load("sum"))
                before = dict(done)
                with news:  # two reloads during one sequence would end it
                    assert news.wait_for(lambda: are_beyond(before), WAIT_S)  # noqa: B023  (called in this turn)
        finally:
            stop.set()
        for one in running:
            one.result(WAIT_S)
