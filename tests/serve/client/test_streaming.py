"""Streams of both clients, on a server and on scripted answers."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfserve import (
    AsyncClient,
    Cancelled,
    Client,
    ClientError,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    ServerUnavailable,
)
from halfserve.protos import inference_pb2 as pb
from halfserve.serve.client import streaming
from halfserve.serve.client.streaming import StreamSession
from tests.serve.client.conftest import Connect
from tests.serve.client.driving import metadata
from tests.serve.client.scripted_server import ENDED, Failure, ScriptedServer
from tests.serve.running_server import RunningServer

WAIT_S = 60.0


def streamed(index: str, *values: float, error: str = "", **parameters: Any) -> pb.ModelStreamInferResponse:
    """An answer of the model "m" to the request of an id."""
    response = pb.ModelStreamInferResponse(error_message=error)
    response.infer_response.id = index
    if values:
        response.infer_response.raw_output_contents.append(np.array(values, np.float32).tobytes())
        response.infer_response.outputs.add(name="y", datatype="FP32", shape=[len(values)])
    for name, value in parameters.items():
        field = "int64_param" if isinstance(value, int) else "string_param"
        setattr(response.infer_response.parameters[name.replace("_", "-")], field, value)
    return response


class Clock:
    """Stands for the module `time`: an hour passes when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class RacingClock(Clock):
    """Once all events have come, each reading is a second later than the one before."""

    def __init__(self, *events: threading.Event) -> None:
        super().__init__()
        self._events = events

    def monotonic(self) -> float:
        self.now += all(event.is_set() for event in self._events)
        return self.now


def rows(count: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(3).standard_normal((count, 64)).astype(np.float16)


def test_answers_come_in_the_order_of_the_requests(server: RunningServer, connect: Connect) -> None:
    x, client = rows(40), connect(server.address)
    answers = list(client.stream_infer("mlp", ({"x": row[np.newaxis]} for row in x), version="3", in_flight=7))
    assert [answer.index for answer in answers] == list(range(40))
    expected = np.concatenate([client.infer("mlp", {"x": x[i : i + 8]})["y"] for i in range(0, 40, 8)])
    np.testing.assert_allclose(np.concatenate([answer.outputs["y"] for answer in answers]), expected, atol=2e-3)


def test_a_failed_request_leaves_the_others_alone(server: RunningServer, connect: Connect) -> None:
    requests = [{"x": rows(1)}, {"x": rows(1)[:, :3]}, {"x": rows(99)}, {"z": rows(1)}, {"x": rows(2)}]
    answers = list(connect(server.address).stream_infer("mlp", requests))
    assert [answer.error is None for answer in answers] == [True, False, False, False, True]
    assert answers[4].outputs["y"].shape == (2, 10)
    for answer, text in zip(answers[1:4], (r"shape \[1, 3\]", "batch size is 99", "no input 'z'"), strict=True):
        with pytest.raises(InvalidRequest, match=text):
            _ = answer.outputs
        assert "InvalidRequest" in repr(answer)


def test_options_are_for_all_requests(server: RunningServer, connect: Connect) -> None:
    requests = [{"x": rows(1).astype(np.float32)}] * 2
    for answer in connect(server.address).stream_infer("mlp", requests, cast=True, top_k=2, outputs=["y"]):
        assert answer.outputs["y"].shape == (1, 2)


def test_no_requests_no_answers(server: RunningServer, connect: Connect) -> None:
    assert list(connect(server.address).stream_infer("mlp", [])) == []


def test_the_number_of_requests_in_flight_is_limited(server: RunningServer, connect: Connect) -> None:
    given_out = 0

    def source() -> Iterator[dict[str, Any]]:
        nonlocal given_out
        while True:
            given_out += 1
            yield {"x": rows(1)}

    stream = connect(server.address).stream_infer("mlp", source(), in_flight=3)
    for taken in range(1, 20):
        next(stream)
        assert given_out <= taken + 3
    stream.close()  # type: ignore[attr-defined]  # (it is a generator)
    assert given_out <= 23


def test_requests_that_are_never_sent_take_turns_too(server: RunningServer, connect: Connect) -> None:
    answers = connect(server.address).stream_infer("mlp", [{"z": rows(1)}] * 3, in_flight=1)
    assert [type(answer.error) for answer in answers] == [InvalidRequest] * 3


@pytest.mark.parametrize("kind", [KeyError, SystemExit, KeyboardInterrupt])
def test_an_exception_of_the_source_comes_after_its_answers(
    server: RunningServer, connect: Connect, kind: type[BaseException]
) -> None:
    def source() -> Iterator[dict[str, Any]]:
        yield {"x": rows(1)}
        yield {"x": rows(1)}
        raise kind("no third image")

    stream = connect(server.address).stream_infer("mlp", source())
    assert [next(stream).index, next(stream).index] == [0, 1]
    with pytest.raises(kind, match="no third image"):
        next(stream)


def test_a_source_whose_own_task_was_cancelled(server: RunningServer) -> None:
    async def source() -> Any:
        yield {"x": rows(1)}
        image = asyncio.get_running_loop().create_future()
        image.cancel()
        await image

    async def ask() -> None:
        async with AsyncClient(server.address) as client:
            stream = client.stream_infer("mlp", source())
            assert (await anext(stream)).index == 0
            with pytest.raises(asyncio.CancelledError):
                await anext(stream)

    asyncio.run(ask())


def test_an_unknown_model_ends_the_stream(server: RunningServer, connect: Connect) -> None:
    with pytest.raises(ModelNotFound, match="nope"):
        list(connect(server.address).stream_infer("nope", [{"x": rows(1)}]))


@pytest.mark.parametrize("in_flight", [0, 65537, True, 1.5])
def test_in_flight_out_of_range_is_refused(connect: Connect, in_flight: Any) -> None:
    with pytest.raises(InvalidRequest, match="in_flight must be 1 to 65536 requests, not"):
        list(connect("127.0.0.1:1").stream_infer("m", [], in_flight=in_flight))


def test_time_that_the_caller_takes_does_not_count(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(streaming, "time", clock)
    with Client(server.address) as client:
        stream = client.stream_infer("mlp", [{"x": rows(1)}] * 4)
        assert next(stream).index == 0
        for thread in threading.enumerate():  # it may have ended already
            if thread.name == "stream answers":
                thread.join(WAIT_S)
        clock.now += 3600
        assert [answer.index for answer in stream] == [1, 2, 3]


def test_time_that_an_asyncio_caller_takes_does_not_count(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(streaming, "time", clock)

    async def ask() -> list[int]:
        async with AsyncClient(server.address) as client:
            stream = client.stream_infer("mlp", [{"x": rows(1)}] * 4)
            first = await anext(stream)
            await asyncio.wait([task for task in asyncio.all_tasks() if "AsyncStream._read" in repr(task)], timeout=WAIT_S)
            clock.now += 3600
            return [first.index, *[answer.index async for answer in stream]]

    assert asyncio.run(ask()) == [0, 1, 2, 3]


def test_an_exception_between_two_answers_is_the_only_one(server: RunningServer) -> None:
    """The exception keeps the stream alive, so that asyncio.run is what closes it.

    In a process of its own: gRPC hands late events of other tests' closed loops to whichever loop runs, which logs them.
    """
    ask = f"""
import asyncio
import numpy as np
from halfserve import AsyncClient

async def ask():
    async with AsyncClient({server.address!r}) as client:
        async for _ in client.stream_infer("mlp", [{{"x": np.zeros((1, 64), np.float16)}}] * 4):
            raise KeyError("the caller's own")

try:
    asyncio.run(ask())
except KeyError as error:
    print(*error.args)
"""
    ran = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert (ran.stdout, ran.stderr) == ("the caller's own\n", "")


def test_asynchronous_sources(server: RunningServer) -> None:
    async def source() -> Any:
        for _ in range(5):
            await asyncio.sleep(0)
            yield {"x": rows(1)}

    async def ask() -> list[int]:
        async with AsyncClient(server.address) as client:
            return [answer.index async for answer in client.stream_infer("mlp", source(), in_flight=2)]

    assert asyncio.run(ask()) == [0, 1, 2, 3, 4]


def test_a_fork_leaves_a_stream_to_its_parent(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    client, rows_sent = Client(server.address), rows(40)
    here = client.stream_infer("mlp", [{"x": row[None]} for row in rows_sent], in_flight=2)
    there = client.stream_infer("mlp", [{"x": row[None]} for row in rows_sent], in_flight=2)
    assert (next(here).index, next(there).index) == (0, 0)
    with monkeypatch.context() as patch:
        process = os.getpid()
        patch.setattr(os, "getpid", lambda: process + 1)
        with pytest.raises(ClientError, match="has connected in another process; gRPC does not survive a fork"):
            next(there)
    assert [answer.index for answer in here] == [*range(1, 40)]
    client.close()


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
        ([streamed("0", 1), streamed("0", 1)], ClientError, "answered request '0' of a stream, which does not wait"),
        ([streamed("5", 1)], ClientError, "answered request '5'"),
        ([streamed("zero", 1)], ClientError, "answered request 'zero'"),
        ([streamed("0" * 5000, 1)], ClientError, "answered request '000"),
        ([b"\xff\xff"], ClientError, "deserializing|no message that can be read"),
        ([streamed("0", 1), Failure("UNAVAILABLE", "going down")], ServerUnavailable, "^going down$|closed the connection"),
        ([streamed("0", 1), ENDED], ServerUnavailable, "ended a stream with . requests unanswered|closed the connection"),
        ([Failure("UNIMPLEMENTED", "no streams")], ClientError, "^no streams$|closed the connection"),
    ],
    ids=["twice", "unasked", "foreign", "long", "unreadable", "lost", "short", "unknown"],
)
def test_a_broken_stream_is_server_unavailable(
    scripted: ScriptedServer, connect: Connect, script: Any, kind: Any, text: str
) -> None:
    scripted.serve_model()
    scripted.answers["ModelStreamInfer"] = script
    with pytest.raises(kind, match=text):
        list(connect(scripted.address).stream_infer("m", [{"x": [[1, 2]]}] * 2, timeout_s=WAIT_S))


def test_an_empty_answer_is_an_error(scripted: ScriptedServer, connect: Connect) -> None:
    scripted.serve_model()
    scripted.answers["ModelStreamInfer"] = [pb.ModelStreamInferResponse(), streamed("1", 1)]
    first, second = connect(scripted.address).stream_infer("m", [{"x": [[1, 2]]}] * 2)
    assert first.error is not None
    assert (first.error.code, str(first.error)) == ("INTERNAL", "the server's answer holds neither outputs nor an error")
    assert second.outputs["y"].tolist() == [1]


def test_no_answer_in_time(scripted: ScriptedServer, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted.serve_model()
    scripted.answers["ModelStreamInfer"] = [streamed("0", 1)]
    scripted.held.add("ModelStreamInfer")
    monkeypatch.setattr(streaming, "time", RacingClock(scripted.arrived))
    stream = connect(scripted.address).stream_infer("m", [{"x": [[1, 2]]}], timeout_s=0.1)
    with pytest.raises(DeadlineExceeded, match="answered none of 1 requests of a stream within 0.1 s; allow more time"):
        list(stream)
    assert scripted.cancelled.wait(WAIT_S)


def test_a_stream_that_the_server_does_not_end(
    scripted: ScriptedServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted.serve_model()
    scripted.answers["ModelStreamInfer"] = [streamed("0", 1), streamed("1", 2)]
    scripted.endless = True
    answered = threading.Event()
    monkeypatch.setattr(streaming, "time", RacingClock(answered, scripted.arrived))
    stream = connect(scripted.address).stream_infer("m", [{"x": [[1, 2]]}] * 2, timeout_s=0.1)
    assert [next(stream).outputs["y"].tolist() for _ in range(2)] == [[1], [2]]
    answered.set()
    assert list(stream) == []
    assert scripted.cancelled.wait(WAIT_S)


def test_closing_the_client_ends_its_streams(scripted: ScriptedServer) -> None:
    scripted.serve_model()
    scripted.answers["ModelStreamInfer"] = [streamed("0", 1)]
    scripted.held.add("ModelStreamInfer")

    async def ask() -> None:
        async with AsyncClient(scripted.address) as client:
            stream = client.stream_infer("m", [{"x": [[1, 2]]}] * 2)
            first = asyncio.ensure_future(anext(stream))
            assert await asyncio.to_thread(scripted.arrived.wait, WAIT_S)
            await client.close()
            with pytest.raises(Cancelled, match="was cancelled before"):
                await first

    asyncio.run(ask())


@given(st.permutations(range(6)), st.sets(st.integers(0, 5)))
def test_any_order_of_answers_becomes_the_order_of_requests(arrival: list[int], misfits: set[int]) -> None:
    session, taken = StreamSession(metadata("FP32"), {}, address="h:1"), []
    sent = [session.request({"x": ["no number"] if index in misfits else [1.0]}) for index in range(6)]
    assert [request is None for request in sent] == [index in misfits for index in range(6)]
    for index in arrival:
        if index not in misfits:
            session.accept(streamed(str(index), float(index)))
        taken += [answer.index for answer in session.ready()]
    assert taken == list(range(6))
    session.check_complete()


def test_an_error_without_an_id_belongs_to_the_first_waiting_request() -> None:
    session = StreamSession(metadata("FP32"), {}, address="h:1")
    for value in ([1.0], ["no number"], [1.0], [1.0]):
        session.request({"x": value})
    session.accept(streamed("0", 1.0))
    session.accept(streamed("", error="odd"))
    session.accept(streamed("3", 3.0))
    assert [str(answer.error) for answer in session.ready()][2:] == ["odd", "None"]


def test_a_stream_that_ends_too_early() -> None:
    session = StreamSession(metadata("FP32"), {}, address="h:1")
    session.request({"x": [1.0]})
    with pytest.raises(ServerUnavailable, match="h:1 ended a stream with 1 requests unanswered; send them again"):
        session.check_complete()


def test_the_server_has_time_to_end_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(streaming, "time", clock)
    session = StreamSession(metadata("FP32"), {}, address="h:1")
    session.request({"x": [1.0]})
    clock.now = 3.0
    session.accept(streamed("0", 1.0))
    clock.now = 60.0
    assert not session.is_over(5)  # the source may have more
    session.complete()
    assert [session.is_over(5), session.patience_s(5)] == [False, 5]
    clock.now = 65.0
    assert session.is_over(5)
    assert not session.is_over(None)


def test_time_that_the_source_takes_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    session = StreamSession(metadata("FP32"), {}, address="h:1")
    assert session.patience_s(None) is None
    now += 60  # the source had nothing to send
    assert session.patience_s(5) == 5
    session.request({"x": [1.0]})
    now += 4
    assert session.patience_s(5) == 1
    session.request({"x": [1.0]})
    session.accept(streamed("0", 1.0))
    assert session.patience_s(5) == 5
    now += 5
    with pytest.raises(DeadlineExceeded, match="h:1 answered none of 1 requests of a stream within 5 s"):
        session.patience_s(5)
