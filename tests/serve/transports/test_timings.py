"""The request parameter halfserve.timings, on every way in."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from halfserve import Client
from halfserve.protos.request_parameters import TIMINGS
from halfserve.serve.client.errors import ClientError
from halfserve.serve.model_control.control_options import ControlMode
from tests.models import save_mlp
from tests.serve.backends.python.python_models import save_python_model, serving
from tests.serve.backends.python.test_decoupled_models import COUNTS, DECOUPLED
from tests.serve.engine.fakes import HOLD_S, HeldBackend, held_model
from tests.serve.http.running_http import running_http
from tests.serve.model_control.controlled import control
from tests.serve.running_server import TRANSPORTS, MakeTransport, RunningServer, running_server
from tests.serve.test_response_caching import ENABLED, PIPE, caching

QUEUE, COMPUTE, TOTAL = "halfserve.queue_ms", "halfserve.compute_ms", "halfserve.total_ms"
ASKED = {TIMINGS: True}
ROW = {"x": np.ones((1, 64), np.float16)}
FORM = re.compile(r"queue;dur=\d+\.\d+, compute;dur=\d+\.\d+, total;dur=\d+\.\d+")
X = {"name": "x", "datatype": "FP32", "shape": [3], "data": [1, 2, 3]}


def check(times: Any) -> None:
    """Check the times of a computed answer, which lie one after the other."""
    assert set(times) == {QUEUE, COMPUTE, TOTAL}
    assert all(isinstance(value, float) and value >= 0 for value in times.values())
    assert times[COMPUTE] > 0
    assert times[QUEUE] + times[COMPUTE] <= times[TOTAL] + 0.002


def test_an_answer_has_the_times_that_its_request_asks_for(server: RunningServer) -> None:
    with Client(server.address) as client:
        plain = client.infer_detailed("mlp", ROW)
        for _ in range(3):  # read whole, split, and matched with a known request
            timed = client.infer_detailed("mlp", ROW, parameters=ASKED)
            check(timed.parameters)
            np.testing.assert_array_equal(timed.outputs["y"], plain.outputs["y"])
        answers = list(client.stream_infer("mlp", [ROW, ROW], parameters=ASKED))
        (untimed,) = client.stream_infer("mlp", [ROW])
        switched_off = client.infer_detailed("mlp", ROW, parameters={TIMINGS: False})
    assert not plain.parameters
    assert not untimed.parameters
    assert not switched_off.parameters
    for answer in answers:
        check(answer.parameters)


@pytest.mark.parametrize("value", ["true", 1, 1.0])
def test_a_value_that_is_no_bool_is_refused(server: RunningServer, value: Any) -> None:
    with Client(server.address) as client, pytest.raises(ClientError, match="'halfserve.timings' is no bool, expected true or"):
        client.infer("mlp", ROW, parameters={TIMINGS: value})


def test_the_queue_lasts_until_the_batch_begins(transport: MakeTransport) -> None:
    backend = HeldBackend(held=True)
    x = {"x": np.ones((1, 1), np.float32)}
    with (
        running_server(lambda: [held_model(backend, "held")], transport) as server,
        ThreadPoolExecutor(2) as threads,
        Client(server.address) as client,
    ):
        client.model_metadata("held")
        first = threads.submit(client.infer_detailed, "held", x, parameters=ASKED)
        assert backend.entered.wait(HOLD_S)
        second = threads.submit(client.infer_detailed, "held", x, parameters=ASKED)
        server.until(lambda: server.core.model("held").batcher.waiting == 1)
        began_s = time.monotonic()
        server.call(lambda: None)
        waited_ms = 1000 * (time.monotonic() - began_s)
        backend.release.set()
        held, queued = (dict[str, Any](answer.result(HOLD_S).parameters) for answer in (first, second))
    check(held)
    check(queued)
    assert held[COMPUTE] > waited_ms - 0.001
    assert queued[QUEUE] > waited_ms - 0.001


def test_an_answer_of_the_response_cache_was_not_computed(tmp_path: Path) -> None:
    save_mlp(tmp_path / "mlp" / "1" / "model.onnx")
    (tmp_path / "mlp" / "config.pbtxt").write_text(f"max_batch_size: 8 {ENABLED}")
    with caching(tmp_path) as (server, _), Client(server.address) as client:
        client.infer("mlp", ROW)  # a request without the parameter has the same answer
        hit = dict[str, Any](client.infer_detailed("mlp", ROW, parameters=ASKED).parameters)
    assert hit[COMPUTE] == 0
    assert 0 <= hit[QUEUE] <= hit[TOTAL]


def test_an_ensemble_has_the_times_of_the_whole(tmp_path: Path) -> None:
    save_mlp(tmp_path / "mlp" / "1" / "model.onnx")
    (tmp_path / "mlp" / "config.pbtxt").write_text("max_batch_size: 8")
    (tmp_path / "pipe" / "1").mkdir(parents=True)
    (tmp_path / "pipe" / "config.pbtxt").write_text(PIPE)
    with running_server(list) as server, Client(server.address) as client:
        controlling = server.call(lambda: control(server.core, tmp_path, ControlMode.NONE))
        server.run(controlling.start())
        check(client.infer_detailed("pipe", ROW, parameters=ASKED).parameters)
        server.call(controlling.close)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_each_response_of_a_decoupled_model_has_its_total(tmp_path: Path, name: str) -> None:
    save_python_model(tmp_path, "counts", COUNTS, DECOUPLED)
    with serving(tmp_path, TRANSPORTS[name]) as server, Client(server.address) as client:
        asked = [{"x": np.array([3], np.float32)}]
        answers = [dict[str, Any](answer.parameters) for answer in client.stream_infer("counts", asked, parameters=ASKED)]
    assert [list(answer) for answer in answers] == [[TOTAL]] * 4  # the last one is the end, without outputs
    totals = [answer[TOTAL] for answer in answers]
    assert totals == sorted(totals)


def test_rest_answers_with_parameters_and_server_timing(server: RunningServer) -> None:
    path, header = "/v2/models/unbatched/infer", {"halfserve-timings": "true"}
    with running_http(server) as rest, httpx.Client(base_url=f"http://127.0.0.1:{rest.port}", timeout=HOLD_S) as client:
        by_parameter = client.post(path, json={"inputs": [X], "parameters": ASKED})
        by_header = client.post(path, json={"inputs": [X]}, headers=header)
        plain = client.post(path, json={"inputs": [X]}, headers={"halfserve-timings": "false"})
    for answer in (by_parameter, by_header):
        check(answer.json()["parameters"])
        assert FORM.fullmatch(answer.headers["server-timing"])
        assert f"total;dur={answer.json()['parameters'][TOTAL]}" in answer.headers["server-timing"]
    assert "server-timing" not in plain.headers
    assert "parameters" not in plain.json()
