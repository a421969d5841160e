"""The order of calls about a server and its models."""

from __future__ import annotations

from typing import Any

import pytest

from protos import inference_pb2 as pb
from serve.client.errors import DeadlineExceeded, InferenceClientError, ModelNotFound, ServerUnavailable
from serve.client.exchanges import inquiries
from serve.client.exchanges.calls import Call, Pause
from serve.client.exchanges.deadline import Deadline
from tests.serve.client.driving import drive


@pytest.mark.parametrize(
    ("answer", "expected"),
    [(pb.ModelReadyResponse(ready=True), True), (pb.ModelReadyResponse(), False), (ModelNotFound("no"), False)],
)
def test_readiness_is_an_answer_not_an_error(answer: Any, expected: bool) -> None:
    assert drive(inquiries.ready("m", ""), [answer]) == (["ModelReady"], expected)


def test_other_errors_are_not_taken_for_unreadiness() -> None:
    with pytest.raises(InferenceClientError, match="broken"):
        drive(inquiries.ready(None, ""), [InferenceClientError("broken", code="INTERNAL")])


def test_waits_longer_and_longer_until_ready() -> None:
    exchange = inquiries.wait_until_ready("m", "", Deadline.after(None))
    pauses = []
    assert isinstance(next(exchange), Call)
    for answer in (ServerUnavailable("gone"), ModelNotFound("not yet"), *[pb.ModelReadyResponse()] * 6):
        step = exchange.throw(answer) if isinstance(answer, Exception) else exchange.send(answer)
        assert isinstance(step, Pause)
        pauses.append(step.seconds)
        assert isinstance(exchange.send(None), Call)
    assert pauses == [0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5, 0.5]
    with pytest.raises(StopIteration):
        exchange.send(pb.ModelReadyResponse(ready=True))


@pytest.mark.parametrize(
    ("model", "answer", "text"),
    [
        ("m", ModelNotFound("no 'm' here"), "^model 'm' was not ready within 0.001 s: no 'm' here$"),
        ("m", pb.ModelReadyResponse(), "^model 'm' was not ready within 0.001 s: it is not there, or not ready yet$"),
        (None, pb.ServerReadyResponse(), "^the server was not ready within 0.001 s: it is there, but not ready$"),
    ],
)
def test_says_what_was_lacking_at_last(model: str | None, answer: Any, text: str) -> None:
    with pytest.raises(DeadlineExceeded, match=text):
        drive(inquiries.wait_until_ready(model, "", Deadline.after(0.001)), [answer])


def test_an_error_that_waiting_cannot_mend_ends_it() -> None:
    with pytest.raises(InferenceClientError, match="no entry"):
        drive(
            inquiries.wait_until_ready(None, "", Deadline.after(9)), [InferenceClientError("no entry", code="UNAUTHENTICATED")]
        )
