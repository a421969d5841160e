"""Errors in Triton's words: its text in front of ours, and its status."""

from __future__ import annotations

import pytest

from halfserve.protos.triton_errors import TritonPhrase
from halfserve.serve.backends.python.process_messages import code_of, phrases_of_models
from halfserve.serve.engine.errors import (
    InferenceError,
    InvalidArgumentError,
    NotFoundError,
    QueueFullError,
    errors_as_in_triton,
    worded,
)
from halfserve.serve.engine.hidden_steps import names_hidden
from halfserve.serve.http.responses import http_status
from halfserve.serve.protocol.status import Code, Status, status_of

UNKNOWN = NotFoundError("no such model").like(TritonPhrase.UNKNOWN_MODEL, model="m")


def full() -> InferenceError:
    return QueueFullError("the queue is full", retry_after_s=0.002).like(TritonPhrase.QUEUE_FULL)


def test_errors_keep_our_words_without_the_setting() -> None:
    assert status_of(UNKNOWN) == Status(Code.NOT_FOUND, "no such model")
    assert http_status(full())[0] == 429
    assert code_of(UNKNOWN) == [2, "no such model"]
    assert phrases_of_models() == {}


def test_tritons_text_comes_first_everywhere() -> None:
    said = "Request for unknown model: 'm' is not found: no such model"
    with errors_as_in_triton(True):
        assert status_of(UNKNOWN) == Status(Code.NOT_FOUND, said)
        assert http_status(UNKNOWN)[:2] == (404, said)
        assert code_of(UNKNOWN) == [2, said]
        assert phrases_of_models()["SENDER_CLOSED"].endswith("has been closed.")
    assert str(UNKNOWN) == "no such model"


def test_a_full_queue_has_tritons_status_and_keeps_its_hint() -> None:
    with errors_as_in_triton(True):
        trailers = (("grpc-retry-pushback-ms", "2"),)
        assert status_of(full()) == Status(Code.UNAVAILABLE, "Exceeds maximum queue size: the queue is full", trailers)
        assert http_status(full())[0] == 503
        assert code_of(full())[0] == 4


def test_lists_are_shown_as_triton_shows_them() -> None:
    facts = {"input": "x", "model": "m", "expected": [-1, 2], "given": (1,)}
    said = TritonPhrase.SHAPE.before("ours", facts)
    assert said == "unexpected shape for input 'x' for model 'm'. Expected [-1,2], got [1]: ours"


def test_a_context_gives_its_errors_a_text() -> None:
    with pytest.raises(InvalidArgumentError) as raised, worded(TritonPhrase.GENERATE_TEXT):
        raise InvalidArgumentError("not a text")
    assert raised.value.phrase is TritonPhrase.GENERATE_TEXT


@pytest.mark.parametrize("is_seen", [True, False])
def test_a_text_names_no_hidden_model(is_seen: bool) -> None:
    with pytest.raises(NotFoundError) as raised, names_hidden(lambda _: is_seen):
        raise UNKNOWN
    with errors_as_in_triton(True):
        assert ("'m'" in status_of(raised.value).details) is is_seen


def test_every_text_takes_the_facts_that_it_names() -> None:
    for phrase in TritonPhrase:
        names = {name: name for name in phrase.text.replace("{", "}").split("}")[1::2]}
        assert phrase.before("ours", names).startswith(phrase.text.split("{")[0])
