"""Headers of calls that become parameters of their inference requests, on every way in."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput, InferResult
from tritonclient.utils import InferenceServerException

from halfserve.serve.http.http_options import HttpOptions
from halfserve.serve.protocol.forwarded_headers import ForwardedHeaders, HeaderPattern
from tests.serve.backends.python.python_models import save_python_model, serving
from tests.serve.http.running_http import running_http
from tests.serve.running_server import TRANSPORTS, MakeTransport

CONFIG = """
input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "y" data_type: TYPE_STRING dims: [ 1 ] }
"""
# Answers with the request's parameters.
TOLD = """
class TritonPythonModel:
    def execute(self, requests):
        told = [np.array([request.parameters()], object) for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", each)]) for each in told]
"""
HEADERS = {"my-tenant": "blue", "my-quote": 'a "b" \\', "other": "x", "priority": "u=1"}
FORWARDED = {"my-tenant": "blue", "my-quote": 'a "b" \\'}


@contextmanager
def servers(root: Path, pattern: str, make_transport: MakeTransport) -> Iterator[tuple[InferenceServerClient, httpx.Client]]:
    """Clients of a server that forwards headers with such names."""
    save_python_model(root, "told", TOLD, CONFIG)
    options = HttpOptions(port=0, metrics_port=None)
    forwarded = ForwardedHeaders(grpc=HeaderPattern(pattern), http=HeaderPattern(pattern))
    with (
        serving(root, make_transport, forwarded=forwarded) as server,
        running_http(server, options, forwarded=forwarded) as rest,
        InferenceServerClient(server.address) as grpc,
        httpx.Client(base_url=f"http://127.0.0.1:{rest.port}/v2/models/told", timeout=60) as http,
    ):
        yield grpc, http


def tensor() -> InferInput:
    asked = InferInput("x", [1], "FP32")
    asked.set_data_from_numpy(np.zeros(1, np.float32))
    return asked


def told(result: InferResult | None) -> Any:
    assert result is not None
    return json.loads(np.asarray(result.as_numpy("y"))[0])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_headers_that_match_become_parameters(tmp_path: Path, transport: str) -> None:
    got: queue.SimpleQueue[tuple[InferResult | None, InferenceServerException | None]] = queue.SimpleQueue()
    expected = {"own": 1, **FORWARDED}
    with servers(tmp_path, "MY-", TRANSPORTS[transport]) as (grpc, http):
        for _ in range(3):  # repeated requests are not parsed
            assert told(grpc.infer("told", [tensor()], headers=HEADERS, parameters={"own": 1})) == expected
        assert told(grpc.infer("told", [tensor()])) == {}
        grpc.start_stream(lambda result, error: got.put((result, error)), headers=HEADERS)
        grpc.async_stream_infer("told", [tensor()], parameters={"own": 1, "my-tenant": "mine"})
        assert told(got.get(timeout=60)[0]) == expected
        grpc.stop_stream()
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [0]}], "parameters": {"own": 1}}
        answer = http.post("/infer", json=body, headers=HEADERS)
        assert json.loads(answer.json()["outputs"][0]["data"][0]) == expected
        answer = http.post("/generate", json={"x": 0, "own": 1}, headers=HEADERS)
        assert json.loads(answer.json()["y"]) == expected


def test_a_pattern_may_heed_case(tmp_path: Path) -> None:
    with servers(tmp_path, "(?-i)MY-", TRANSPORTS["nghttp2"]) as (grpc, _):
        assert told(grpc.infer("told", [tensor()], headers=HEADERS)) == {}


def test_a_pattern_for_all_spares_what_the_server_heeds(tmp_path: Path) -> None:
    with servers(tmp_path, ".*", TRANSPORTS["nghttp2"]) as (grpc, _):
        parameters = told(grpc.infer("told", [tensor()], headers={**HEADERS, "triton_grpc_error": "true"}))
        assert parameters.keys() - {"user-agent", "accept-encoding"} == {"my-tenant", "my-quote", "other"}


def test_no_parameter_of_a_client_begins_as_the_servers_own(tmp_path: Path) -> None:
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [0]}], "parameters": {"triton_x": True}}
    with servers(tmp_path, "my-", TRANSPORTS["nghttp2"]) as (_, http):
        for path, asked in (("/infer", body), ("/generate", {"x": 0, "triton_x": True})):
            answer = http.post(path, json=asked)
            assert (answer.status_code, answer.json()["error"][:46]) == (400, "parameter 'triton_x' begins with 'triton_', wh")


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="'x\\(' is no regular expression .*; expected one such as"):
        HeaderPattern("x(")
