"""Whatever comes in is answered with a status that fits, never with a failure of the server's own."""

from __future__ import annotations

import json
from typing import Any

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

INFER = "/v2/models/unbatched/infer"
STATUSES = {200, 400, 403, 404, 405, 409, 413, 415, 501, 503}
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["x", "y", "FP32", "FP16", "\ud800"])
)
ANY_JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
)
TENSOR: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [3], "data": [1, 2, 3], "parameters": {}}
REQUEST: dict[str, Any] = {"id": "a", "inputs": [TENSOR], "outputs": [{"name": "y", "parameters": {}}], "parameters": {}}
PARAMETERS = st.dictionaries(
    st.sampled_from(["binary_data", "binary_data_size", "binary_data_output", "classification", "timeout", "priority"])
    | st.sampled_from(["shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"])
    | st.text(max_size=3),
    LEAVES,
    max_size=3,
)
often = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def infer(http: httpx.Client, content: bytes, **headers: str) -> httpx.Response:
    answer = http.post(INFER, content=content, headers=headers)
    assert answer.status_code in STATUSES, (content, answer.text)
    if answer.status_code != 200:
        assert answer.json().keys() == {"error"}
        assert len(answer.json()["error"]) < 1000
    return answer


@often
@given(content=ANY_JSON)
def test_any_json_is_answered(http: httpx.Client, content: Any) -> None:
    infer(http, json.dumps(content).encode())


@often
@given(content=st.binary(max_size=200), length=st.integers(-1, 300) | st.text("0123456789 .x", min_size=1, max_size=30))
def test_any_bytes_are_answered(http: httpx.Client, content: bytes, length: int | str) -> None:
    infer(http, content, **{"inference-header-content-length": str(length).strip() or "0"})


@often
@given(field=st.sampled_from([*TENSOR, *REQUEST]), value=ANY_JSON)
def test_one_wrong_field_is_answered(http: httpx.Client, field: str, value: Any) -> None:
    content = {**REQUEST, field: value} if field in REQUEST else {**REQUEST, "inputs": [{**TENSOR, field: value}]}
    infer(http, json.dumps(content).encode())


@often
@given(of_request=PARAMETERS, of_input=PARAMETERS, of_output=PARAMETERS, behind=st.binary(max_size=13))
def test_any_parameters_are_answered(
    http: httpx.Client, of_request: dict[str, Any], of_input: dict[str, Any], of_output: dict[str, Any], behind: bytes
) -> None:
    given_input = {**TENSOR, "parameters": of_input}
    if "binary_data_size" in of_input:
        del given_input["data"]
    content = {"inputs": [given_input], "outputs": [{"name": "y", "parameters": of_output}], "parameters": of_request}
    head = json.dumps(content).encode()
    infer(http, head + behind, **{"inference-header-content-length": str(len(head))})


def test_the_server_still_answers(http: httpx.Client) -> None:
    assert infer(http, json.dumps(REQUEST).encode()).status_code == 200
