"""Streams of both clients, against the real server."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from serve.client import (
    AsyncInferenceClient,
    InferenceClient,
    InferenceClientError,
    InvalidRequest,
    ModelNotFound,
)
from serve.client.streaming import stream_order
from tests.serve.client.conftest import Connect
from tests.serve.client.streaming.streamed import Clock
from tests.serve.running_server import RunningServer

WAIT_S = 20


def rows(count: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(3).standard_normal((count, 64)).astype(np.float16)


def test_answers_come_in_the_order_of_the_requests(server: RunningServer, connect: Connect) -> None:
    x, client = rows(40), connect(server.address)
    answers = list(client.stream_infer("mlp", ({"x": row[np.newaxis]} for row in x), version="3", in_flight=7))
    assert [answer.index for answer in answers] == list(range(40))
    expected = np.concatenate([client.infer("mlp", {"x": x[i : i + 8]})["y"] for i in range(0, 40, 8)])
    np.testing.assert_allclose(np.concatenate([answer.outputs["y"] for answer in answers]), expected, atol=2e-3)


def test_a_request_that_fails_is_its_own_affair(server: RunningServer, connect: Connect) -> None:
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


def test_only_so_many_are_in_flight(server: RunningServer, connect: Connect) -> None:
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


def test_what_the_source_raises_comes_after_its_answers(server: RunningServer, connect: Connect) -> None:
    def source() -> Iterator[dict[str, Any]]:
        yield {"x": rows(1)}
        yield {"x": rows(1)}
        raise KeyError("no third image")

    stream = connect(server.address).stream_infer("mlp", source())
    assert [next(stream).index, next(stream).index] == [0, 1]
    with pytest.raises(KeyError, match="no third image"):
        next(stream)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_a_source_may_end_the_program(server: RunningServer, connect: Connect, kind: type[BaseException]) -> None:
    def source() -> Iterator[dict[str, Any]]:
        yield {"x": rows(1)}
        raise kind("the list of images is wrong")

    stream = connect(server.address).stream_infer("mlp", source())
    assert next(stream).index == 0
    with pytest.raises(kind, match="the list of images is wrong"):
        next(stream)


def test_a_source_whose_own_task_was_cancelled(server: RunningServer) -> None:
    async def source() -> Any:
        yield {"x": rows(1)}
        image = asyncio.get_running_loop().create_future()
        image.cancel()
        await image

    async def ask() -> None:
        async with AsyncInferenceClient(server.address) as client:
            stream = client.stream_infer("mlp", source())
            assert (await anext(stream)).index == 0
            with pytest.raises(asyncio.CancelledError):
                await anext(stream)

    asyncio.run(ask())


def test_an_unknown_model_ends_the_stream(server: RunningServer, connect: Connect) -> None:
    with pytest.raises(ModelNotFound, match="nope"):
        list(connect(server.address).stream_infer("nope", [{"x": rows(1)}]))


@pytest.mark.parametrize("in_flight", [0, 65537, True, 1.5])
def test_in_flight_has_bounds(connect: Connect, in_flight: Any) -> None:
    with pytest.raises(InvalidRequest, match="in_flight must be 1 to 65536 requests, not"):
        list(connect("127.0.0.1:1").stream_infer("m", [], in_flight=in_flight))


def test_time_that_the_caller_takes_does_not_count(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(stream_order, "time", clock)
    with InferenceClient(server.address) as client:
        stream = client.stream_infer("mlp", [{"x": rows(1)}] * 4)
        assert next(stream).index == 0
        next(thread for thread in threading.enumerate() if thread.name == "stream answers").join(WAIT_S)
        clock.now += 3600
        assert [answer.index for answer in stream] == [1, 2, 3]


def test_time_that_an_asyncio_caller_takes_does_not_count(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(stream_order, "time", clock)

    async def ask() -> list[int]:
        async with AsyncInferenceClient(server.address) as client:
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
from serve.client import AsyncInferenceClient

async def ask():
    async with AsyncInferenceClient({server.address!r}) as client:
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
        async with AsyncInferenceClient(server.address) as client:
            return [answer.index async for answer in client.stream_infer("mlp", source(), in_flight=2)]

    assert asyncio.run(ask()) == [0, 1, 2, 3, 4]


def test_a_fork_amid_a_stream_says_so_and_leaves_it_to_its_parent(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, rows_sent = InferenceClient(server.address), rows(40)
    here = client.stream_infer("mlp", [{"x": row[None]} for row in rows_sent], in_flight=2)
    there = client.stream_infer("mlp", [{"x": row[None]} for row in rows_sent], in_flight=2)
    assert (next(here).index, next(there).index) == (0, 0)
    with monkeypatch.context() as patch:
        process = os.getpid()
        patch.setattr(os, "getpid", lambda: process + 1)
        with pytest.raises(InferenceClientError, match="has connected in another process; gRPC does not survive a fork"):
            next(there)
    assert [answer.index for answer in here] == [*range(1, 40)]
    client.close()
