"""Triton's generate extension, as people call it with curl."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from halfserve.serve.http.http_options import HttpOptions
from tests.serve.backends.python.python_models import save_python_model, serving
from tests.serve.http.running_http import running_http
from tests.serve.http.test_inference import wait_until

OPTIONS = HttpOptions(port=0, metrics_port=None)
TELLER = """
input { name: "text" data_type: TYPE_STRING dims: [ 1, 1 ] }
input { name: "shout" data_type: TYPE_BOOL dims: [ 1, 1 ] }
input { name: "ids" data_type: TYPE_INT32 dims: [ 1, -1 ] optional: true }
output { name: "told" data_type: TYPE_STRING dims: [ 1, -1 ] }
output { name: "count" data_type: TYPE_INT32 dims: [ 1 ] }
model_transaction_policy { decoupled: true }
"""
# Tells a text `times` times, a word more each time if `grows`, then fails if `fails`; waits for a request with `go` before the
# second time if `waits`.
TELLS = """
class TritonPythonModel:
    def initialize(self, args):
        self.go = threading.Event()

    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.tell, args=(request.get_response_sender(), request)).start()

    def tell(self, sender, request):
        asked = json.loads(request.parameters())
        text, shout, *ids = [tensor.as_numpy() for tensor in request.inputs()]
        word = text[0, 0].decode()
        for time in range(asked.get("times", 1)):
            if time and asked.get("waits"):
                self.go.wait()
                self.go.clear()
            words = [word.upper() if shout[0, 0] else word] * (time + 1 if asked.get("grows") else 1)
            count = pb_utils.Tensor("count", np.array([sum(each.size for each in ids)], np.int32))
            told = pb_utils.Tensor("told", np.array([words], object))
            sender.send(pb_utils.InferenceResponse([told, count]))
        last = pb_utils.InferenceResponse(error=pb_utils.TritonError("lost the thread")) if asked.get("fails") else None
        sender.send(last, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        if asked.get("go"):
            self.go.set()
"""
ASKED = {"text": "hello", "shout": False}
TIMED = {"halfserve-timings": "true"}


@pytest.fixture(scope="module")
def teller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server on the model `teller`."""
    root = tmp_path_factory.mktemp("repository")
    save_python_model(root, "teller", TELLS, TELLER)
    with (
        serving(root) as server,
        running_http(server, OPTIONS) as rest,
        httpx.Client(base_url=f"http://127.0.0.1:{rest.port}/v2/models/teller", timeout=60) as client,
    ):
        yield client


def events(lines: Iterator[str]) -> Iterator[Any]:
    """The objects of server-sent events."""
    for line in lines:
        if line:
            assert line.startswith("data: ")
            yield json.loads(line.removeprefix("data: "))


def streamed(client: httpx.Client, **asked: Any) -> tuple[int, str, list[Any]]:
    with client.stream("POST", "/generate_stream", json={**ASKED, **asked}) as answer:
        return answer.status_code, answer.headers["content-type"], list(events(answer.iter_lines()))


def test_fields_are_inputs_by_name_and_outputs_are_fields(http: httpx.Client) -> None:
    for path in ("/v2/models/unbatched/generate", "/v2/models/unbatched/versions/1/generate"):
        answer = http.post(path, json={"x": [1, 2, 3]})
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
        assert answer.json() == {"model_name": "unbatched", "model_version": "1", "y": [2.0, 4.0, 6.0]}


def test_flat_values_take_the_shape_that_the_model_declares(http: httpx.Client, teller: httpx.Client) -> None:
    rows = http.post("/v2/models/mlp/generate", json={"x": [0.5] * 128, "id": "two rows"})
    assert (len(rows.json()["y"]), rows.json()["id"]) == (20, "two rows")
    assert http.post("/v2/models/mlp/generate", json={"x": [0.5] * 65}).status_code == 400
    answer = teller.post("/generate", json={**ASKED, "ids": [100, 200, 300]})
    assert answer.json() == {"model_name": "teller", "model_version": "1", "told": "hello", "count": 3}


def test_other_fields_and_those_of_parameters_are_parameters(teller: httpx.Client) -> None:
    expected = [{"model_name": "teller", "model_version": "1", "told": "hello", "count": 0}] * 2
    event_stream = "text/event-stream; charset=utf-8"
    assert streamed(teller, times=2) == (200, event_stream, expected)
    assert streamed(teller, parameters={"times": 2}) == (200, event_stream, expected)
    assert streamed(teller, times=0) == (200, event_stream, [])
    grown = streamed(teller, text=["a"], times=2, parameters={"grows": True})[2]
    assert [event["told"] for event in grown] == ["a", ["a", "a"]]


def test_a_request_has_a_field_once(teller: httpx.Client) -> None:
    for body in ('{"text": "a", "shout": false, "text": "b"}', '{"text": "a", "shout": false, "parameters": {"shout": true}}'):
        for path in ("/generate", "/generate_stream"):
            answer = teller.post(path, content=body)
            assert (answer.status_code, answer.headers["content-type"]) == (400, "application/json")
            assert "expected it once" in answer.json()["error"]


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({}, "missing input 'text', 'shout'; the model takes 'text', 'shout', 'ids'"),
        ({"text": "a"}, "missing input 'shout'"),
        ({"text": 123, "shout": False}, "input 'text' has the element 123 in data, expected texts for BYTES"),
        ({"text": "a", "shout": "false"}, "input 'shout' has the element 'false' in data, expected true or false for BOOL"),
        ({"text": {"user": "a"}, "shout": True}, "input 'text' has the element {'user': 'a'} in data, expected texts"),
        ({**ASKED, "more": {"a": 1}}, "the request has parameter 'more' that is not text, a number, true or false"),
        ({**ASKED, "parameters": {"a": {"b": 1}}}, "the request has parameter 'a' that is not text"),
        ({**ASKED, "parameters": 1}, "the request has parameters 1, expected an object"),
        ({**ASKED, "id": 1}, "the request has id 1, expected text"),
    ],
    ids=range(9),
)
def test_wrong_requests_are_answered_with_json(teller: httpx.Client, asked: dict[str, Any], text: str) -> None:
    for path in ("/generate", "/generate_stream"):
        answer = teller.post(path, json=asked)
        assert (answer.status_code, answer.headers["content-type"]) == (400, "application/json")
        assert answer.json()["error"].startswith(text)


def test_generate_takes_exactly_one_response(teller: httpx.Client) -> None:
    for times in (0, 2):
        answer = teller.post("/generate", json={**ASKED, "times": times})
        assert answer.status_code == 500
        assert "generate takes exactly one response" in answer.json()["error"]


def test_an_error_sets_the_status_if_it_comes_first(teller: httpx.Client) -> None:
    status, kind, said = streamed(teller, times=0, fails=True)
    assert (status, kind) == (500, "text/event-stream; charset=utf-8")
    assert ["lost the thread" in event["error"] for event in said] == [True]
    status, kind, said = streamed(teller, times=1, fails=True)
    assert (status, said[0]["told"]) == (200, "hello")
    assert ["lost the thread" in event["error"] for event in said[1:]] == [True]
    failed = teller.post("/generate", json={**ASKED, "times": 0, "fails": True})
    assert (failed.status_code, "lost the thread" in failed.json()["error"]) == (500, True)


def test_responses_are_sent_as_they_come(teller: httpx.Client) -> None:
    with teller.stream("POST", "/generate_stream", json={**ASKED, "times": 2, "waits": True}) as answer:
        coming = events(answer.iter_lines())
        assert next(coming)["told"] == "hello"
        assert teller.post("/generate", json={**ASKED, "go": True}).status_code == 200
        assert next(coming)["told"] == "hello"
        assert list(coming) == []


def test_a_client_that_goes_cancels_the_responses_to_come(teller: httpx.Client) -> None:
    def failed() -> int:
        return int(teller.get("/stats").json()["model_stats"][0]["inference_stats"]["fail"]["count"])

    before = failed()
    with teller.stream("POST", "/generate_stream", json={**ASKED, "times": 2, "waits": True}) as answer:
        assert next(events(answer.iter_lines()))["told"] == "hello"
    wait_until(lambda: failed() > before)
    assert teller.post("/generate", json={**ASKED, "go": True}).status_code == 200  # wakes the model


def test_the_times_of_a_request_are_in_a_header_and_in_each_response(teller: httpx.Client) -> None:
    answer = teller.post("/generate", json=ASKED, headers=TIMED)
    assert answer.headers["server-timing"] == f"total;dur={answer.json()['halfserve.total_ms']}"
    with teller.stream("POST", "/generate_stream", json={**ASKED, "times": 2}, headers=TIMED) as answered:
        first, second = (event["halfserve.total_ms"] for event in events(answered.iter_lines()))
        assert answered.headers["server-timing"] == f"total;dur={first}"
    assert 0 < first <= second
    assert "halfserve.total_ms" in teller.post("/generate", json={**ASKED, "halfserve.timings": True}).json()
    assert "server-timing" not in teller.post("/generate", json=ASKED).headers
