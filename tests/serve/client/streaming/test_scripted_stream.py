"""Streams of both clients, against a server that does what a script says."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from protos import inference_pb2 as pb
from serve.client import (
    AsyncInferenceClient,
    Cancelled,
    DeadlineExceeded,
    InferenceClientError,
    Overloaded,
    ServerUnavailable,
)
from tests.serve.client.conftest import Connect
from tests.serve.client.scripted_server import ENDED, Failure, ScriptedServer
from tests.serve.client.streaming.streamed import streamed

WAIT_S = 20


def test_an_error_has_the_status_that_the_server_adds(scripted: ScriptedServer, connect: Connect) -> None:
    scripted.serve_model()
    full = streamed("0", error="full", grpc_status=8, grpc_retry_pushback_ms="1500")
    never = streamed("2", error="full", grpc_status=8, grpc_retry_pushback_ms="9" * 400)
    scripted.answers["ModelStreamInfer"] = [full, streamed("", error="odd"), never]
    first, second, third = connect(scripted.address).stream_infer("m", [{"x": [[1, 2]]}] * 3)
    assert isinstance(third.error, Overloaded)
    assert third.error.retry_after_s is None
    assert isinstance(first.error, Overloaded)
    assert first.error.retry_after_s == 1.5
    assert second.error is not None
    assert (second.error.code, str(second.error)) == ("UNKNOWN", "odd")


@pytest.mark.parametrize(
    ("script", "kind", "text"),
    [
        ([streamed("0", 1), streamed("0", 1)], InferenceClientError, "answered request '0' of a stream, which does not wait"),
        ([streamed("5", 1)], InferenceClientError, "answered request '5'"),
        ([streamed("zero", 1)], InferenceClientError, "answered request 'zero'"),
        ([streamed("0" * 5000, 1)], InferenceClientError, "answered request '000"),
        ([b"\xff\xff"], InferenceClientError, "deserializing|no message that can be read"),
        ([streamed("0", 1), Failure("UNAVAILABLE", "going down")], ServerUnavailable, "^going down$|closed the connection"),
        ([streamed("0", 1), ENDED], ServerUnavailable, "ended a stream with . requests unanswered|closed the connection"),
        ([Failure("UNIMPLEMENTED", "no streams")], InferenceClientError, "^no streams$|closed the connection"),
    ],
    ids=["twice", "unasked", "foreign", "long", "unreadable", "lost", "short", "unknown"],
)
def test_a_stream_that_breaks(scripted: ScriptedServer, connect: Connect, script: Any, kind: Any, text: str) -> None:
    scripted.serve_model()
    scripted.answers["ModelStreamInfer"] = script
    with pytest.raises(kind, match=text):
        list(connect(scripted.address).stream_infer("m", [{"x": [[1, 2]]}] * 2, timeout_s=WAIT_S))


def test_an_answer_that_is_empty(scripted: ScriptedServer, connect: Connect) -> None:
    scripted.serve_model()
    scripted.answers["ModelStreamInfer"] = [pb.ModelStreamInferResponse(), streamed("1", 1)]
    first, second = connect(scripted.address).stream_infer("m", [{"x": [[1, 2]]}] * 2)
    assert first.error is not None
    assert (first.error.code, str(first.error)) == ("INTERNAL", "the server's answer holds neither outputs nor an error")
    assert second.outputs["y"].tolist() == [1]


def test_an_answer_without_what_was_asked_for(scripted: ScriptedServer, connect: Connect) -> None:
    scripted.serve_model()
    (metadata,) = scripted.answers["ModelMetadata"]
    assert isinstance(metadata, pb.ModelMetadataResponse)
    metadata.outputs.add(name="y", datatype="FP32", shape=[-1])
    scripted.answers["ModelStreamInfer"] = [streamed("0"), streamed("1", 1)]
    first, second = connect(scripted.address).stream_infer("m", [{"x": [[1, 2]]}] * 2, outputs=["y"])
    assert first.error is not None
    assert "the server's answer has 0 outputs 'y', expected one" in str(first.error)
    assert second.outputs["y"].tolist() == [1]


def test_no_answer_in_time(scripted: ScriptedServer, connect: Connect) -> None:
    scripted.serve_model()
    scripted.answers["ModelStreamInfer"] = [streamed("0", 1)]
    scripted.held.add("ModelStreamInfer")
    stream = connect(scripted.address).stream_infer("m", [{"x": [[1, 2]]}] * 2, timeout_s=0.1)
    with pytest.raises(DeadlineExceeded, match="answered none of 2 requests of a stream within 0.1 s; allow more time"):
        list(stream)
    assert scripted.cancelled.wait(WAIT_S)


def test_a_stream_that_the_server_does_not_end(scripted: ScriptedServer, connect: Connect) -> None:
    scripted.serve_model()
    scripted.answers["ModelStreamInfer"] = [streamed("0", 1), streamed("1", 2)]
    scripted.endless = True
    started_s = time.monotonic()
    answers = list(connect(scripted.address).stream_infer("m", [{"x": [[1, 2]]}] * 2, timeout_s=0.1))
    assert [answer.outputs["y"].tolist() for answer in answers] == [[1], [2]]
    assert time.monotonic() - started_s < WAIT_S / 2  # the server would have waited longer
    assert scripted.cancelled.wait(WAIT_S)


def test_answers_out_of_order_are_put_in_order(scripted: ScriptedServer, connect: Connect) -> None:
    scripted.serve_model()
    scripted.answers["ModelStreamInfer"] = [streamed("1", 1), streamed("0", 0), streamed("2", 2)]
    scripted.patient = True
    answers = list(connect(scripted.address).stream_infer("m", [{"x": [[1, 2]]}] * 3))
    assert [answer.outputs["y"].tolist() for answer in answers] == [[0], [1], [2]]


def test_closing_the_client_ends_its_streams(scripted: ScriptedServer) -> None:
    scripted.serve_model()
    scripted.answers["ModelStreamInfer"] = [streamed("0", 1)]
    scripted.held.add("ModelStreamInfer")

    async def ask() -> None:
        async with AsyncInferenceClient(scripted.address) as client:
            stream = client.stream_infer("m", [{"x": [[1, 2]]}] * 2)
            first = asyncio.ensure_future(anext(stream))
            assert await asyncio.to_thread(scripted.arrived.wait, WAIT_S)
            await client.close()
            with pytest.raises(Cancelled, match="was given up before"):
                await first

    asyncio.run(ask())
