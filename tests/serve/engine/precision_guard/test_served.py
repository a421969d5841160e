"""Guarded models behind a real server: what their clients get, and what is counted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from serve.engine.model import Model
from serve.engine.precision_guard.counters import GuardCounters
from serve.engine.tensors import Array
from serve.http.options import HttpOptions
from tests.serve.engine.precision_guard.asking import ask_model
from tests.serve.engine.precision_guard.guarded_models import load, write_table, write_thousandfold
from tests.serve.http.running_http import running_http
from tests.serve.running_server import RunningServer, running_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Models "count", "reject", "fallback" and "off" (the table), "wide" (x 1000, fallback), "wide_reject", "shadowed"."""
    root = tmp_path_factory.mktemp("guarded")
    for policy in ("count", "reject", "fallback", "off"):
        write_table(root / policy, precision_guard=policy)
    write_thousandfold(root / "wide", precision_guard="fallback")
    write_thousandfold(root / "wide_reject", precision_guard="reject")
    write_thousandfold(root / "shadowed", shadow_rate="1", shadow_share="1")
    with running_server(lambda: load(root)) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.address) as connected:
        yield connected


def ask(client: triton.InferenceServerClient, model: str, array: Array, outputs: object = None) -> triton.InferResult:
    name, datatype = ("i", "INT64") if array.dtype == np.int64 else ("x", "FP16")
    given = triton.InferInput(name, list(array.shape), datatype)
    given.set_data_from_numpy(array)
    return client.infer(model, [given], outputs=outputs, client_timeout=20)


def rows(*indices: int) -> Array:
    return np.array(indices, np.int64).reshape(-1, 1)


def model_of(server: RunningServer, name: str) -> Model:
    return server.call(lambda: server.core.model(name))


def counters(server: RunningServer, name: str) -> GuardCounters:
    guard = model_of(server, name).guard
    assert guard is not None
    return guard.counters()


def test_a_model_counts_by_default_and_passes_on(server: RunningServer, client: triton.InferenceServerClient) -> None:
    before = counters(server, "count")
    assert ask(client, "count", rows(0, 1, 1)).as_numpy("y").ravel().tolist() == [5.0, np.inf, np.inf]
    after = counters(server, "count")
    assert after.outputs["y"].non_finite_values - before.outputs["y"].non_finite_values == 2
    assert after.outputs["y"].non_finite_requests - before.outputs["y"].non_finite_requests == 1
    assert (after.rejected, after.fallbacks, after.policy) == (0, 0, "count")


def test_rejecting_fails_the_request_and_says_why(server: RunningServer, client: triton.InferenceServerClient) -> None:
    assert ask(client, "reject", rows(0)).as_numpy("y").ravel().tolist() == [5.0]
    with pytest.raises(InferenceServerException) as failed:
        ask(client, "reject", rows(1, 0))
    assert failed.value.status() == "StatusCode.INTERNAL"
    assert failed.value.message() == (
        "output 'y' holds 1 of 2 values that are NaN or infinite, though every input is finite; send inputs of the size "
        "that the model was verified with, or serve it with the guard's policy 'fallback'"
    )
    assert counters(server, "reject").rejected >= 1


def test_falling_back_answers_in_fp32_and_says_so(server: RunningServer, client: triton.InferenceServerClient) -> None:
    good, bad = ask(client, "fallback", rows(0)), ask(client, "fallback", rows(1, 0))
    assert not good.get_response().parameters
    assert bad.as_numpy("y").ravel().tolist() == [49_152.0, 5.0]
    assert bad.as_numpy("y").dtype == np.float16
    assert bad.get_response().parameters["halfserve.precision"].string_param == "fp32"
    assert counters(server, "fallback").fallbacks >= 1


def test_an_answer_in_fp32_may_be_wanted_as_classes(client: triton.InferenceServerClient) -> None:
    wanted = [triton.InferRequestedOutput("y", class_count=1)]
    answer = ask(client, "fallback", rows(1), wanted)
    assert answer.as_numpy("y").ravel().tolist() == [b"49152.000000:0"]
    assert answer.get_response().parameters["halfserve.precision"].string_param == "fp32"


def test_an_answer_in_fp32_says_so_in_json_too(server: RunningServer) -> None:
    def asked(row: int) -> dict[str, Any]:
        body = {"inputs": [{"name": "i", "shape": [1, 1], "datatype": "INT64", "data": [row]}]}
        answer: dict[str, Any] = httpx.post(f"{url}/v2/models/fallback/infer", json=body, timeout=20).json()
        return answer

    with running_http(server, HttpOptions(port=0, metrics_port=None)) as rest:
        url = f"http://127.0.0.1:{rest.port}"
        good, bad = asked(0), asked(1)
    assert "parameters" not in good
    assert (bad["parameters"], bad["outputs"][0]["data"]) == ({"halfserve.precision": "fp32"}, [49_152.0])


def test_off_does_not_look(server: RunningServer, client: triton.InferenceServerClient) -> None:
    assert model_of(server, "off").guard is None
    assert ask(client, "off", rows(1)).as_numpy("y").ravel().tolist() == [np.inf]


def test_only_the_bad_one_of_a_batch_is_touched(server: RunningServer, client: triton.InferenceServerClient) -> None:
    model = model_of(server, "reject")

    async def at_once() -> list[object]:
        return list(await asyncio.gather(*(ask_model(model, rows(i)) for i in (0, 1, 0))))

    first, second, third = server.run(at_once())
    assert str(second).startswith("output 'y' holds 1 of 1 values")
    assert (first, third) == ([5.0], [5.0])
    assert model.statistics.totals.by_batch_size


def test_what_comes_in_infinite_may_go_out_so(server: RunningServer, client: triton.InferenceServerClient) -> None:
    x = np.array([[1, np.inf, 2, np.nan]], np.float16)
    before = counters(server, "wide_reject").outputs["y"]
    assert np.array_equal(ask(client, "wide_reject", x).as_numpy("y"), [[1000, np.inf, 2000, np.nan]], equal_nan=True)
    after = counters(server, "wide_reject").outputs["y"]
    assert (after.non_finite_values, after.from_inputs) == (before.non_finite_values, before.from_inputs + 1)


def test_an_overflow_of_the_output_alone_is_seen_where_the_cpu_computes_in_fp32(
    server: RunningServer, client: triton.InferenceServerClient
) -> None:
    with pytest.raises(InferenceServerException, match="output 'y' holds 2 of 4 values that are NaN or infinite"):
        ask(client, "wide_reject", np.array([[1, 100, 65, -66]], np.float16))


def test_fp32_does_not_help_where_the_output_cannot_hold_the_number(client: triton.InferenceServerClient) -> None:
    with pytest.raises(
        InferenceServerException, match=r"in fp32 they are finite, but 1 of output 'y' are beyond float16's range"
    ):
        ask(client, "wide", np.array([[1, 100, 2, 3]], np.float16))


def test_events_tell_what_happened(server: RunningServer, client: triton.InferenceServerClient) -> None:
    ask(client, "fallback", rows(1))
    guard = model_of(server, "fallback").guard
    assert guard is not None
    event = guard.recent_events()[0]
    assert (event.model, event.kind) == ("fallback/1", "fallback")
    assert event.text == "answered in fp32: output 'y' holds 1 of 1 values that are NaN or infinite"
    assert event.time > 1.7e9


def test_shadow_runs_measure_the_drift(server: RunningServer, client: triton.InferenceServerClient) -> None:
    answers = [ask(client, "shadowed", np.array([[0.1, 0.2, 0.3, 7]], np.float16)).as_numpy("y") for _ in range(3)]
    assert all(answer.argmax() == 3 for answer in answers)
    guard = model_of(server, "shadowed").guard
    assert guard is not None
    assert guard._shadow is not None
    done = threading.Event()
    guard._shadow._worker.submit(done.set)  # type: ignore[union-attr]  # (started by the first sample)
    assert done.wait(20)
    counted = guard.counters()
    assert counted.shadow_runs + counted.shadow_dropped == 3
    output = counted.outputs["y"]
    assert output.drift is not None
    # fp16 rounds the products, and that by less than 2**-11 of the largest.
    assert sum(output.drift.counts) == counted.shadow_runs >= 1
    assert 0 < output.drift.total / counted.shadow_runs < 2**-11
    assert (output.rows_compared, output.rows_agreeing) == (counted.shadow_runs,) * 2
    assert (counted.degraded, counted.drift_threshold) == (False, 0.01)
