"""Bodies that are nothing but the one tensor that a model takes: its one text, or the bytes of its numbers."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from onnx import TensorProto, helper

from halfserve.protos.inference_pb2 import ModelInferRequest
from halfserve.serve.engine.errors import InvalidArgumentError
from halfserve.serve.engine.model import Model
from halfserve.serve.http.http_options import HttpLimits, HttpOptions, memory_of
from halfserve.serve.http.infer_route import RestRequest, raw_request, read_request
from halfserve.serve.http.request_body import FULL
from halfserve.serve.http.rest_server import RestServer
from halfserve.serve.observability.observe_options import AccessLog, ObserveOptions
from halfserve.serve.security.memory_budget import MemoryBudget
from tests.models import save_model
from tests.serve.engine.ensembles.scene import StepBackend, model
from tests.serve.engine.fakes import HOLD_S, HeldBackend, held_model
from tests.serve.engine.model_folders import load
from tests.serve.http.running_http import running_http
from tests.serve.running_server import running_server

INFER = "/v2/models/unbatched/infer"
HEADER = "inference-header-content-length"
X = {"name": "x", "datatype": "FP32", "shape": [3], "data": [1, 2, 3]}
FP16_X = {"name": "x", "datatype": "FP16", "shape": [1, 2], "data": [1.5, -2]}
Y = {"name": "y", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 4}}

MOST_THREADS = 64  # of an event loop: at least as many
ONE_ELEMENT = {
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}],
    "parameters": {"binary_data_output": True},
}


def ones_model(columns: int) -> Model:
    """A model of one element whose answer is large."""
    backend = StepBackend(lambda inputs: {"y": np.ones((len(inputs["x"]), columns), np.float32)})
    return model("wide", backend, outputs={"y": ("FP32", (-1, columns))})


def wait_until(reached: Callable[[], bool]) -> None:
    end_s = time.monotonic() + HOLD_S
    while not reached():
        assert time.monotonic() < end_s


def test_json_in_json_out(http: httpx.Client) -> None:
    answer = http.post(INFER, json={"id": "a", "inputs": [X]})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert HEADER not in answer.headers
    assert answer.json() == {
        "model_name": "unbatched",
        "model_version": "1",
        "id": "a",
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [3], "data": [2.0, 4.0, 6.0]}],
    }


def test_fp16_as_numbers(http: httpx.Client) -> None:
    x = {"name": "x", "datatype": "FP16", "shape": [1, 64], "data": [[0.5] * 64]}
    answer = http.post("/v2/models/mlp/versions/1/infer", json={"inputs": [x]}).json()
    assert answer["model_version"] == "1"
    data = np.array(answer["outputs"][0]["data"])
    np.testing.assert_array_equal(data, data.astype(np.float16))  # each is an fp16 number


def test_a_body_may_be_the_bytes_of_the_only_input(http: httpx.Client) -> None:
    raw = np.array([1, 2, 3], "<f4").tobytes()
    answer = http.post(INFER, content=raw, headers={HEADER: "0"})
    assert answer.headers["content-type"] == "application/octet-stream"
    length = int(answer.headers[HEADER])
    assert json.loads(answer.content[:length])["outputs"][0]["parameters"] == {"binary_data_size": 12}
    assert np.frombuffer(answer.content[length:], "<f4").tolist() == [2, 4, 6]


def test_the_batch_of_such_a_body_is_one(http: httpx.Client) -> None:
    answer = http.post("/v2/models/mlp/infer", content=bytes(128), headers={HEADER: "0"})
    assert json.loads(answer.content[: int(answer.headers[HEADER])])["outputs"][0]["shape"] == [1, 10]


def test_mixed_outputs_travel_as_asked(http: httpx.Client) -> None:
    asked = [{"name": "y", "parameters": {"binary_data": True, "classification": 2}}]
    x = {"name": "x", "datatype": "FP16", "shape": [1, 64], "data": [0] * 64}
    answer = http.post("/v2/models/mlp/infer", json={"inputs": [x], "outputs": asked})
    length = int(answer.headers[HEADER])
    assert json.loads(answer.content[:length])["outputs"][0]["datatype"] == "BYTES"
    assert answer.content[length:].endswith(b"0.000000:1:one")


def test_answers_are_compressed_where_it_pays(http: httpx.Client) -> None:
    x = {"name": "x", "datatype": "FP16", "shape": [16, 64], "data": [1] * 1024}
    large = http.post("/v2/models/mlp/infer", json={"inputs": [x]}, headers={"accept-encoding": "gzip"})
    assert large.headers["content-encoding"] == "gzip"
    assert len(large.json()["outputs"][0]["data"]) == 160
    small = http.post(INFER, json={"inputs": [X]}, headers={"accept-encoding": "gzip"})
    assert "content-encoding" not in small.headers


def test_large_bodies_are_answered_alike(http: httpx.Client) -> None:
    x = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float16)
    data = [{"name": "x", "datatype": "FP16", "shape": [16, 64], "data": x.ravel().tolist()}]
    padded = json.dumps({"inputs": data, "parameters": {"note": "." * 200_000}}).encode()
    first = http.post("/v2/models/mlp/infer", content=gzip.compress(padded), headers={"content-encoding": "gzip"})
    assert first.json() == http.post("/v2/models/mlp/infer", json={"inputs": data}).json()


def test_answers_that_are_no_text_must_be_asked_for_as_bytes(http: httpx.Client) -> None:
    answer = http.post("/v2/models/echo_types/infer", json={"inputs": [X]})
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("input 'x' is not one of the model's: ")


@pytest.mark.parametrize(
    ("path", "content", "headers", "status", "text"),
    [
        (INFER, b"{", {}, 400, "the body is not JSON: "),
        (INFER, b"{}", {}, 400, "missing input 'x'; the model takes 'x'"),
        (
            INFER,
            b"",
            {HEADER: "5"},
            400,
            "Inference-Header-Content-Length is '5', expected a number of bytes up to the body's 0",
        ),
        (INFER, b"abc", {HEADER: "-1"}, 400, "Inference-Header-Content-Length is '-1', expected a number"),
        (INFER, b"abc", {HEADER: "0"}, 400, "input 'x' has 3 bytes, expected 12 for FP32 of shape [3]"),
        (
            "/v2/models/echo_types/infer",
            b"abc",
            {HEADER: "0"},
            400,
            "Inference-Header-Content-Length is 0, but model 'echo_types' has ",
        ),
        (INFER, b"abc", {"content-encoding": "gzip"}, 400, "the body does not decompress as gzip"),
        (INFER, b"abc", {"content-encoding": "zstd"}, 501, "Content-Encoding 'zstd' is not known here"),
        ("/v2/models/nobody/infer", b"{}", {}, 404, "model 'nobody' is not served here"),
        ("/v2/models/mlp/versions/7/infer", b"{}", {}, 404, "model 'mlp' has no version 7; served: 1, 3"),
        ("/v2/models/mlp/versions/x/infer", b"{}", {}, 400, "model version 'x' is not a number"),
        ("/v2/models/%2e%2e%2fsecret/infer", b"{}", {}, 404, ""),
        ("/v2/models/mlp/inferno", b"{}", {}, 404, "nothing is served at this path; /openapi.json lists what is"),
    ],
    ids=range(13),
)
def test_wrong_requests_are_answered(
    http: httpx.Client, path: str, content: bytes, headers: dict[str, str], status: int, text: str
) -> None:
    answer = http.post(path, content=content, headers=headers)
    assert answer.status_code == status
    assert answer.json()["error"].startswith(text)
    assert http.get("/v2/health/live").status_code == 200


def test_a_wrong_method_is_answered_with_the_allowed_one(http: httpx.Client) -> None:
    answer = http.get(INFER)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json() == {"error": "GET is not served at this path, expected POST"}


def test_requests_are_in_the_access_log(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    observe = ObserveOptions(access_log=AccessLog.ALL, access_log_file=log)
    options = HttpOptions(port=0, metrics_port=None)
    with running_server(lambda: [held_model(HeldBackend())]) as server:
        with (
            running_http(server, options, observe=observe) as rest,
            httpx.Client(base_url=f"http://127.0.0.1:{rest.port}", timeout=60) as http,
        ):
            path, headers = "/v2/models/held/infer", {"x-request-id": "from-proxy"}
            assert http.post(path, json=held_body(1), headers=headers).status_code == 200
            assert http.post(path, json=held_body(-1)).status_code == 500
            assert http.post(path, json={"inputs": 3}).status_code == 400
        assert server.call(lambda: dict(server.core.figures.refused)) == {"invalid_argument": 1}
    answered, failed, refused = map(json.loads, log.read_text().splitlines())
    assert (answered["status"], answered["model"], answered["id"]) == ("OK", "held", "from-proxy")
    assert (failed["status"], failed["model"]) == ("INTERNAL", "held")
    assert (refused["status"], refused["model"], refused["error"][:24]) == (
        "INVALID_ARGUMENT",
        "held",
        "the request has inputs 3",
    )


def held_body(value: float = 1, **parameters: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [value]}], "parameters": parameters}


def test_a_full_queue_and_a_spent_time_have_their_statuses() -> None:
    backend = HeldBackend(held=True)
    model = held_model(backend, max_waiting=1)
    with running_server(lambda: [model]) as server, running_http(server) as rest:
        address = ("127.0.0.1", rest.port)
        with socket.create_connection(address) as first, socket.create_connection(address) as second:
            post(first, held_body(1))
            assert backend.entered.wait(HOLD_S)
            post(second, held_body(2))
            wait_until_waiting(rest, 1)
            answer = httpx.post(f"http://127.0.0.1:{rest.port}/v2/models/held/infer", json=held_body(3), timeout=60)
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"].startswith("the model's queue is full")
            backend.release.set()
            assert b'"data":[2.0]' in read_answer(first)
            assert b'"data":[3.0]' in read_answer(second)


@pytest.mark.parametrize("entry", ["infer", "generate", "generate_stream"])
def test_a_client_that_goes_frees_its_place(entry: str, caplog: pytest.LogCaptureFixture) -> None:
    body = held_body(2) if entry == "infer" else {"x": 2}
    backend = HeldBackend(held=True)
    with (
        running_server(lambda: [held_model(backend)]) as server,
        running_http(server) as rest,
        socket.create_connection(("127.0.0.1", rest.port)) as first,
    ):
        post(first, held_body(1))
        assert backend.entered.wait(HOLD_S)
        with socket.create_connection(("127.0.0.1", rest.port)) as second:
            post(second, body, entry)
            wait_until_waiting(rest, 1)
        wait_until_waiting(rest, 0)
        backend.release.set()
        assert b'"data":[2.0]' in read_answer(first)
        assert backend.batches == [[1.0]]
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


def test_bodies_over_the_limit_are_refused_before_they_are_read(http: httpx.Client) -> None:
    limits = HttpLimits(max_body_bytes=1000)
    with running_server(lambda: [held_model(HeldBackend())]) as server, running_http(server, limits=limits) as rest:
        url = f"http://127.0.0.1:{rest.port}/v2/models/held/infer"
        bomb = gzip.compress(bytes(2_000_000), 9)[:900]
        for headers, content, advice in (
            ({}, bytes(2000), "split the request"),
            ({"content-encoding": "gzip"}, bomb, "send it uncompressed"),
        ):
            answer = httpx.post(url, content=content, headers=headers, timeout=60)
            assert answer.status_code == 413
            assert f"is too large, expected at most 1000; {advice}" in answer.json()["error"]
        chunks = httpx.post(url, content=iter([bytes(600), bytes(600)]), timeout=60)
        assert chunks.status_code == 413
        assert "a message of more than 1000 bytes is too large, expected at most 1000;" in chunks.json()["error"]


@pytest.mark.parametrize(
    ("unit", "count", "status", "text"),
    [
        (
            b"[],",
            1_100_000,
            400,
            "the body's JSON has more than 1000000 values besides flat lists of numbers; send tensors as such",
        ),
        (
            b'"",',
            1_100_000,
            400,
            "the body's JSON has more than 1000000 values besides flat lists of numbers; send tensors as such",
        ),
        (
            b" ",
            70_000_000,
            413,
            "a message of more than 67108864 bytes is too large, expected at most 67108864; send it uncompressed",
        ),
    ],
    ids=["lists", "texts", "nothing"],
)
def test_a_small_body_does_not_become_a_large_document(
    http: httpx.Client, unit: bytes, count: int, status: int, text: str
) -> None:
    body = gzip.compress(b'{"inputs":[' + unit * count + b"{}]}")
    answer = http.post(INFER, content=body, headers={"content-encoding": "gzip"})
    assert len(body) < 100_000
    assert (answer.status_code, answer.json()["error"][: len(text)]) == (status, text)


def test_what_was_inflated_is_held_until_it_is_answered() -> None:
    backend, budget = HeldBackend(held=True), MemoryBudget(memory_of(1_500_000))
    body = gzip.compress(json.dumps(held_body()).encode() + b" " * 999_900)
    headers = {"content-encoding": "gzip"}
    with (
        running_server(lambda: [held_model(backend)]) as server,
        running_http(server, budget=budget) as rest,
        httpx.Client(base_url=f"http://127.0.0.1:{rest.port}/v2/models/held", timeout=HOLD_S) as client,
        ThreadPoolExecutor() as apart,
    ):
        # One beyond the budget fits.
        taken = [apart.submit(client.post, "/infer", content=body, headers=headers) for _ in range(2)]
        while server.call(lambda: budget.held_bytes) < 2 * memory_of(999_900):
            pass
        refused = client.post("/infer", content=body, headers=headers)
        assert (refused.status_code, refused.json()["error"]) == (503, FULL)
        backend.release.set()
        assert [answer.result().status_code for answer in taken] == [200, 200]
        assert client.post("/infer", content=body, headers=headers).status_code == 200
        assert server.call(lambda: budget.held_bytes) == 0


def test_an_answer_counts_before_a_thread_encodes_it() -> None:
    answer_bytes, budget, gate = 2**22, MemoryBudget(2**28), threading.Event()
    wide = ones_model(answer_bytes // 4)
    with (
        running_server(lambda: [wide]) as server,
        running_http(server, budget=budget) as rest,
        httpx.Client(base_url=f"http://127.0.0.1:{rest.port}/v2/models/wide", timeout=HOLD_S) as client,
        ThreadPoolExecutor() as apart,
    ):
        server.call(lambda: [asyncio.get_running_loop().run_in_executor(None, gate.wait, HOLD_S) for _ in range(MOST_THREADS)])
        asked = apart.submit(client.post, "/infer", json=ONE_ELEMENT)
        try:
            wait_until(lambda: server.call(lambda: budget.held_bytes) > 2 * answer_bytes)
        finally:
            gate.set()
        assert asked.result().status_code == 200


def test_an_answer_counts_whole_until_it_is_read_to_its_end() -> None:
    answer_bytes, budget = 2**24, MemoryBudget(2**28)
    body = json.dumps(ONE_ELEMENT).encode()
    with (
        running_server(lambda: [ones_model(answer_bytes // 4)]) as server,
        running_http(server, budget=budget) as rest,
        socket.create_connection(("127.0.0.1", rest.port), timeout=HOLD_S) as peer,
    ):
        head = f"POST /v2/models/wide/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        peer.sendall(head.encode() + body)
        # The system's buffers take some of it, but the server holds it in one piece.
        wait_until(lambda: memory_of(answer_bytes) <= server.call(lambda: budget.held_bytes) < memory_of(answer_bytes + 2**16))
        answer = read_answer(peer)
        assert len(answer) > answer_bytes
        wait_until(lambda: server.call(lambda: budget.held_bytes) == 0)


def test_a_body_that_does_not_come_is_given_up() -> None:
    limits = HttpLimits(stall_s=0.05)
    with (
        running_server(lambda: [held_model(HeldBackend())]) as server,
        running_http(server, limits=limits) as rest,
        socket.create_connection(("127.0.0.1", rest.port)) as peer,
    ):
        peer.sendall(b"POST /v2/models/held/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
        assert b"504" in read_answer(peer).splitlines()[0]


def test_a_timeout_that_passes_while_the_model_is_busy_is_answered_then() -> None:
    backend = HeldBackend(held=True)
    url = "/v2/models/held/infer"
    with (
        running_server(lambda: [held_model(backend)]) as server,
        running_http(server) as rest,
        httpx.Client(base_url=f"http://127.0.0.1:{rest.port}", timeout=HOLD_S) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        running = pool.submit(client.post, url, json=held_body(1))
        assert backend.entered.wait(HOLD_S)
        late = client.post(url, json={**held_body(2), "parameters": {"timeout": 100_000}})
        assert late.status_code == 504
        assert "longer than its timeout allows; it was not computed" in late.json()["error"]
        assert not running.done()
        backend.release.set()
        assert running.result().status_code == 200
    assert backend.batches == [[1.0]]


def post(peer: socket.socket, body: dict[str, Any], entry: str = "infer") -> None:
    content = json.dumps(body).encode()
    head = f"POST /v2/models/held/{entry} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n\r\n"
    peer.settimeout(HOLD_S)
    peer.sendall(head.encode() + content)


def received(peer: socket.socket) -> bytes:
    data = peer.recv(65536)
    assert data, "the server has closed the connection"
    return data


def read_answer(peer: socket.socket) -> bytes:
    peer.settimeout(HOLD_S)
    data = b""
    while b"\r\n\r\n" not in data:
        data += received(peer)
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(int(line.split(b":")[1]) for line in head.lower().splitlines() if line.startswith(b"content-length"))
    while len(body) < length:
        body += received(peer)
    return head + b"\r\n\r\n" + body


def wait_until_waiting(rest: RestServer, count: int) -> None:
    """Ask the page's state until its queue holds `count` requests; each question is a turn of the event loop."""

    def waiting() -> int:
        (model,) = httpx.get(f"http://127.0.0.1:{rest.port}/ui/state", timeout=HOLD_S).json()["models"]
        return int(model["waiting"])

    wait_until(lambda: waiting() == count)


def read(content: Any, behind: bytes = b"") -> RestRequest:
    head = json.dumps(content).encode()
    return read_request(head + behind, len(head) if behind else None, "m", "2")


def message(content: Any, behind: bytes = b"") -> ModelInferRequest:
    return ModelInferRequest.FromString(read(content, behind).message)


def test_json_becomes_the_message() -> None:
    request = message({"id": "7", "inputs": [FP16_X]})
    assert (request.model_name, request.model_version, request.id) == ("m", "2", "7")
    assert (request.inputs[0].name, request.inputs[0].datatype, list(request.inputs[0].shape)) == ("x", "FP16", [1, 2])
    assert list(request.raw_input_contents) == [np.array([1.5, -2], "<f2").tobytes()]


def test_bytes_behind_the_json_go_to_their_inputs_in_order() -> None:
    shared = {"name": "s", "datatype": "FP32", "shape": [1], "parameters": {"shared_memory_region": "r"}}
    other = {**Y, "name": "z", "parameters": {"binary_data_size": 2, "own": 1}}
    request = message({"inputs": [Y, FP16_X, shared, other]}, b"abcdef")
    assert [bytes(raw) for raw in request.raw_input_contents] == [b"abcd", np.array([1.5, -2], "<f2").tobytes(), b"ef"]
    assert not request.inputs[0].parameters
    assert request.inputs[2].parameters["shared_memory_region"].string_param == "r"
    assert request.inputs[3].parameters["own"].int64_param == 1


def test_parameters_keep_their_kind() -> None:
    given = {"priority": 2, "big": 2**63, "deep": 0.5, "flag": True, "text": "t", "binary_data_output": True}
    parameters = message({"inputs": [], "parameters": given}).parameters
    assert parameters["priority"].int64_param == 2
    assert parameters["big"].uint64_param == 2**63
    assert parameters["deep"].double_param == 0.5
    assert parameters["flag"].bool_param is True
    assert parameters["text"].string_param == "t"
    assert "binary_data_output" not in parameters


def test_outputs_say_how_they_travel() -> None:
    asked = [{"name": "a", "parameters": {"binary_data": False, "classification": 3}}, {"name": "b"}]
    request = read({"inputs": [], "outputs": asked, "parameters": {"binary_data_output": True}})
    assert not request.is_binary("a")
    assert request.is_binary("b")
    sent = ModelInferRequest.FromString(request.message)
    assert sent.outputs[0].parameters["classification"].int64_param == 3
    assert "binary_data" not in sent.outputs[0].parameters


def test_the_same_request_is_the_same_bytes() -> None:
    content = {"inputs": [FP16_X], "parameters": {"b": 1, "a": 2, "c": "x"}}
    assert read(content).message == read(content).message


def test_a_bare_tensor_becomes_the_message() -> None:
    request = ModelInferRequest.FromString(raw_request(b"ab", "m", "", "x", "FP16", [1]).message)
    assert list(request.raw_input_contents) == [b"ab"]
    assert raw_request(b"", "m", "", "x", "FP16", [1]).is_binary("y")


@pytest.mark.parametrize(
    ("content", "behind", "text"),
    [
        ({"inputs": 3}, b"", "the request has inputs 3, expected a list"),
        ({"inputs": [3]}, b"", "an entry of inputs is 3, expected an object"),
        ({"inputs": [{}]}, b"", "an entry of inputs has no 'name', expected text"),
        ({"inputs": [{**FP16_X, "datatype": "FP8"}]}, b"", "input 'x' has datatype 'FP8', expected one of BOOL, UINT8"),
        ({"inputs": [{**FP16_X, "shape": [2, 2]}]}, b"", r"input 'x' has 2 elements in data, expected 4 for shape \[2, 2\]"),
        ({"inputs": [{**FP16_X, "shape": None}]}, b"", "input 'x' has no 'shape', expected a list"),
        ({"inputs": [{**Y, "data": [1]}]}, b"abcd", "input 'y' must have exactly one of data, parameter binary_data_size"),
        ({"inputs": [{**Y, "parameters": {}}]}, b"", "input 'y' must have exactly one of data"),
        ({"inputs": [Y]}, b"abc", "input 'y' has binary_data_size 4, but 3 bytes are left behind the JSON"),
        ({"inputs": [Y]}, b"abcde", "1 bytes behind the JSON belong to no input; expected none"),
        (
            {"inputs": [FP16_X], "parameters": {"p": [1]}},
            b"",
            "the request has parameter 'p' that is not text, a number, true or false",
        ),
        ({"inputs": [FP16_X], "parameters": {"p": 2**64}}, b"", "the request has parameter 'p'"),
        ({"inputs": [FP16_X], "outputs": [{}]}, b"", "an entry of outputs has no 'name', expected text"),
        ({"inputs": [FP16_X], "id": 5}, b"", "the request has id 5, expected text"),
    ],
    ids=range(14),
)
def test_a_wrong_request_is_refused(content: Any, behind: bytes, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        read(content, behind)


def answer_to(folder: Path, shape: list[int | str], body: bytes, kind: int = TensorProto.STRING) -> httpx.Response:
    """Of a model that gives back what it gets."""
    save_model(folder / "echo.onnx", [helper.make_node("Identity", ["x"], ["y"])], [("x", kind, shape)], [("y", kind, shape)])
    with running_server(lambda: [load(folder / "echo.onnx")]) as server, running_http(server) as rest:
        return httpx.post(f"http://127.0.0.1:{rest.port}/v2/models/echo/infer", content=body, headers={HEADER: "0"}, timeout=60)


@pytest.mark.parametrize("shape", [[1], ["batch", 1]])
@pytest.mark.parametrize("text", ["caf\u00e9", ""])
def test_a_body_may_be_the_only_text(tmp_path: Path, shape: list[int | str], text: str) -> None:
    answer = answer_to(tmp_path, shape, text.encode())
    length = int(answer.headers[HEADER])
    assert json.loads(answer.content[:length])["outputs"][0]["shape"] == [1] * len(shape)
    size = len(text.encode())
    assert answer.content[length:] == size.to_bytes(4, "little") + text.encode()


def test_a_body_is_not_one_of_several_texts(tmp_path: Path) -> None:
    answer = answer_to(tmp_path, ["batch", 2], b"text")
    assert (answer.status_code, answer.json()["error"].partition("has ")[2]) == (
        400,
        "no shape that follows from its bytes; send JSON",
    )


@pytest.mark.parametrize(
    ("shape", "count", "asked"), [([2, "n"], 6, [2, 3]), (["n", 2], 2, [1, 2]), ([2, "n", 0], 0, [2, 0, 0])]
)
def test_the_one_size_that_is_open_follows_from_the_bytes(
    tmp_path: Path, shape: list[int | str], count: int, asked: list[int]
) -> None:
    body = np.arange(count, dtype=np.float32).tobytes()
    answer = answer_to(tmp_path, shape, body, TensorProto.FLOAT)
    length = int(answer.headers[HEADER])
    assert json.loads(answer.content[:length])["outputs"][0]["shape"] == asked
    assert answer.content[length:] == body


def test_what_is_left_over_of_the_bytes_is_refused(tmp_path: Path) -> None:
    answer = answer_to(tmp_path, [2, "n"], bytes(4 * 5), TensorProto.FLOAT)
    assert answer.status_code == 400
    assert answer.json()["error"] == "input 'x' has 20 bytes, expected 16 for FP32 of shape [2, 2]"
