from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from protos.inference_pb2 import ModelInferRequest
from serve.engine.errors import InvalidArgumentError
from serve.http.infer_request import RestRequest, raw_request, read_request

X = {"name": "x", "datatype": "FP16", "shape": [1, 2], "data": [1.5, -2]}
Y = {"name": "y", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 4}}


def read(content: Any, behind: bytes = b"") -> RestRequest:
    head = json.dumps(content).encode()
    return read_request(head + behind, len(head) if behind else None, "m", "2")


def message(content: Any, behind: bytes = b"") -> ModelInferRequest:
    return ModelInferRequest.FromString(read(content, behind).message)


def test_json_becomes_the_message() -> None:
    request = message({"id": "7", "inputs": [X]})
    assert (request.model_name, request.model_version, request.id) == ("m", "2", "7")
    assert (request.inputs[0].name, request.inputs[0].datatype, list(request.inputs[0].shape)) == ("x", "FP16", [1, 2])
    assert list(request.raw_input_contents) == [np.array([1.5, -2], "<f2").tobytes()]


def test_bytes_behind_the_json_go_to_their_inputs_in_order() -> None:
    shared = {"name": "s", "datatype": "FP32", "shape": [1], "parameters": {"shared_memory_region": "r"}}
    other = {**Y, "name": "z", "parameters": {"binary_data_size": 2, "own": 1}}
    request = message({"inputs": [Y, X, shared, other]}, b"abcdef")
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
    content = {"inputs": [X], "parameters": {"b": 1, "a": 2, "c": "x"}}
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
        ({"inputs": [{**X, "datatype": "FP8"}]}, b"", "input 'x' has datatype 'FP8', expected one of BOOL, UINT8"),
        ({"inputs": [{**X, "shape": [2, 2]}]}, b"", r"input 'x' has 2 elements in data, expected 4 for shape \[2, 2\]"),
        ({"inputs": [{**X, "shape": None}]}, b"", "input 'x' has no 'shape', expected a list"),
        ({"inputs": [{**Y, "data": [1]}]}, b"abcd", "input 'y' must have exactly one of data, parameter binary_data_size"),
        ({"inputs": [{**Y, "parameters": {}}]}, b"", "input 'y' must have exactly one of data"),
        ({"inputs": [Y]}, b"abc", "input 'y' has binary_data_size 4, but 3 bytes are left behind the JSON"),
        ({"inputs": [Y]}, b"abcde", "1 bytes behind the JSON belong to no input; expected none"),
        (
            {"inputs": [X], "parameters": {"p": [1]}},
            b"",
            "the request has parameter 'p' that is no text, number, true or false",
        ),
        ({"inputs": [X], "parameters": {"p": 2**64}}, b"", "the request has parameter 'p'"),
        ({"inputs": [X], "outputs": [{}]}, b"", "an entry of outputs has no 'name', expected text"),
        ({"inputs": [X], "id": 5}, b"", "the request has id 5, expected text"),
    ],
    ids=range(14),
)
def test_a_wrong_request_is_refused(content: Any, behind: bytes, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        read(content, behind)
