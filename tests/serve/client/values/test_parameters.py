from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from protos import inference_pb2 as pb
from serve.client.errors import InvalidRequest
from serve.client.values.parameters import add_parameters, is_stateful


def request(parameters: Any = None, *, priority: Any = 0, queue_timeout_s: Any = None) -> pb.ModelInferRequest:
    made = pb.ModelInferRequest()
    add_parameters(made, parameters, priority=priority, queue_timeout_s=queue_timeout_s)
    return made


@pytest.mark.parametrize(
    ("value", "field", "sent"),
    [
        (True, "bool_param", True),
        (np.bool_(0), "bool_param", False),
        (-3, "int64_param", -3),
        (2**63 - 1, "int64_param", 2**63 - 1),
        (2**63, "uint64_param", 2**63),
        (np.int32(4), "int64_param", 4),
        (0.5, "double_param", 0.5),
        ("a", "string_param", "a"),
    ],
)
def test_values_take_the_field_of_their_type(value: Any, field: str, sent: Any) -> None:
    parameter = request({"p": value}).parameters["p"]
    assert parameter.WhichOneof("parameter_choice") == field
    assert getattr(parameter, field) == sent


@pytest.mark.parametrize(("value", "text"), [(2**64, "must fit 64 bits"), (None, "must be a bool, int, float or str")])
def test_other_values_have_no_place(value: Any, text: str) -> None:
    with pytest.raises(InvalidRequest, match=f"parameter 'p' {text}"):
        request({"p": value})


def test_priority_and_queue_timeout_are_the_protocols() -> None:
    made = request(priority=2, queue_timeout_s=0.25)
    assert made.parameters["priority"].int64_param == 2
    assert made.parameters["timeout"].int64_param == 250_000
    assert request(queue_timeout_s=1e-9).parameters["timeout"].int64_param == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"priority": -1}, "priority must be a whole number, 1 for the most urgent, not -1"),
        ({"priority": 1.5}, "priority must be a whole number"),
        ({"queue_timeout_s": "3"}, "queue_timeout_s must be seconds above 0, or None, not '3'"),
        ({"parameters": {1: 2}}, "a parameter's name must be text, not 1"),
        ({"parameters": {"\ud800": 2}}, "a parameter's name must be text that UTF-8 can say"),
        ({"parameters": {"a": "\ud800"}}, "parameter 'a' must be text that UTF-8 can say, not .*: surrogates not allowed"),
        ({"queue_timeout_s": 0}, "queue_timeout_s must be seconds above 0, or None, not 0"),
        ({"queue_timeout_s": float("nan")}, "queue_timeout_s must be seconds above 0"),
    ],
)
def test_priorities_and_timeouts_that_are_none(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        request(**options)


def test_a_sequence_has_a_state() -> None:
    assert is_stateful(request({"sequence_id": 1}))
    assert not is_stateful(request({"other": 1}))
