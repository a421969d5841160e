from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from onnx import TensorProto, helper

from halfserve.protos import inference_pb2 as pb
from halfserve.protos.datatypes import BY_WIRE
from halfserve.serve.engine.errors import InferenceError, InvalidArgumentError
from halfserve.serve.engine.execution.output_backlog import BACKLOG, LARGE_BYTES, MOST_BYTES
from halfserve.serve.engine.inference_core import InferenceCore, RestrictedCore
from halfserve.serve.engine.tensors import Array, Tensors
from halfserve.serve.protocol.large_bytes import MANY_TEXTS, WRITERS, DeferredResponse
from halfserve.serve.protocol.raw_tensors import to_raw
from halfserve.serve.protocol.service import INFER_PATH
from tests.models import save_model
from tests.serve.engine.model_folders import load
from tests.serve.running_server import TRANSPORTS, running_server

WAIT_S = 60.0
FEW, LONG = {"y": np.full(MANY_TEXTS, b"", object)}, {"y": np.full(MANY_TEXTS, b"", object), "z": np.full(1, b"", object)}
SMALL, LARGE = {"y": np.zeros(LARGE_BYTES, np.uint8)}, {"y": np.zeros(LARGE_BYTES, np.uint8), "z": np.zeros(1, np.uint8)}


def where(result: Any) -> bytes:
    """Writes the name of the thread."""
    return f"{type(result).__name__} on {threading.current_thread().name}".encode()


def answered(
    result: Any, then: Callable[[DeferredResponse], None] = lambda _: None
) -> tuple[list[bytes | InferenceError], list[bytes | InferenceError]]:
    """What was replied at once, and in the end."""

    async def run() -> tuple[list[bytes | InferenceError], list[bytes | InferenceError]]:
        replies, kept = list[bytes | InferenceError](), set[asyncio.Task[None]]()
        apart = DeferredResponse(where, replies.append, kept.add)
        apart.done(result)
        at_once = replies.copy()
        then(apart)
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
        return at_once, replies

    return asyncio.run(run())


@pytest.mark.parametrize(("few", "many"), [(FEW, LONG), (SMALL, LARGE)], ids=["texts", "numbers"])
def test_many_are_written_on_a_thread_and_few_where_they_are(few: Tensors, many: Tensors) -> None:
    assert answered(few) == ([b"dict on MainThread"],) * 2
    assert answered(InvalidArgumentError("wrong")) == ([b"InvalidArgumentError on MainThread"],) * 2
    at_once, (written,) = answered(many)
    assert at_once == []
    assert isinstance(written, bytes)
    assert written.startswith(b"dict on responses_")


def test_the_event_loop_serializes_no_large_response_however_many_wait() -> None:
    go_on = threading.Event()
    large: Tensors = {"y": np.zeros(MOST_BYTES // 2, np.uint8)}

    def held(result: Any) -> bytes:
        assert go_on.wait(WAIT_S)
        return where(result)

    async def run() -> list[bytes | InferenceError]:
        replies, kept = list[bytes | InferenceError](), set[asyncio.Task[None]]()
        for _ in range(5):
            DeferredResponse(held, replies.append, kept.add).done(large)
        assert replies == []
        assert BACKLOG.size == 5 * MOST_BYTES // 2
        go_on.set()
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*kept)
        return replies

    assert [str(reply).startswith("b'dict on responses_") for reply in asyncio.run(run())] == [True] * 5
    assert BACKLOG.size == 0


def test_nobody_is_answered_who_has_gone() -> None:
    assert answered(LONG, DeferredResponse.gone) == ([], [])


def test_it_is_written_all_the_same_where_there_is_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", refused)
    assert answered(LONG) == ([], [b"dict on MainThread"])


def test_who_goes_while_it_is_written_gets_nothing() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def write(_: object) -> bytes:
        begun.set()
        assert go_on.wait(WAIT_S)
        return b"late"

    async def run() -> list[bytes | InferenceError]:
        replies, kept = list[bytes | InferenceError](), set[asyncio.Task[None]]()
        apart = DeferredResponse(write, replies.append, kept.add)
        result: Tensors = LONG
        apart.done(result)
        await asyncio.to_thread(begun.wait, WAIT_S)
        apart.gone()
        go_on.set()
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
        return replies

    assert asyncio.run(run()) == []


def texts(rows: int) -> Array:
    return np.array([[b"%d/%d" % (row, place) for place in range(MANY_TEXTS)] for row in range(rows)], object)


def numbers(rows: int) -> Array:
    return np.arange(rows * LARGE_BYTES // 4, dtype=np.float32).reshape(rows, -1)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("wire", "make"), [("BYTES", texts), ("FP32", numbers)])
def test_large_answers_come_back_to_who_sent_them(
    wire: str, make: Callable[[int], Array], transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datatype, kind = BY_WIRE[wire], TensorProto.STRING if wire == "BYTES" else TensorProto.FLOAT
    save_model(
        tmp_path / "echo.onnx",
        [helper.make_node("Identity", ["x"], ["y"])],
        [("x", kind, ["batch", "n"])],
        [("y", kind, ["batch", "n"])],
    )
    arrays = {rows: make(rows) for rows in (1, 3)}
    with (
        running_server(lambda: [load(tmp_path / "echo.onnx")], TRANSPORTS[transport]) as server,
        grpc.insecure_channel(server.address, [("grpc.max_receive_message_length", -1)]) as channel,
    ):
        on_threads: list[Any] = []
        submit = ThreadPoolExecutor.submit

        def noted(pool: ThreadPoolExecutor, write: Callable[[Any], Any], *outputs: Any) -> Any:
            if pool is WRITERS:
                on_threads.append(outputs)
            return submit(pool, write, *outputs)

        monkeypatch.setattr(ThreadPoolExecutor, "submit", noted)
        infer, pending = channel.unary_unary(INFER_PATH), {}
        for rows, array in arrays.items():
            request = pb.ModelInferRequest(model_name="echo", raw_input_contents=[to_raw(array, datatype)])
            request.inputs.add(name="x", datatype=wire, shape=array.shape)
            pending[rows] = infer.future(request.SerializeToString(), timeout=WAIT_S)
        for rows, answer in pending.items():
            response = pb.ModelInferResponse.FromString(answer.result())
            assert tuple(response.outputs[0].shape) == arrays[rows].shape
            assert response.raw_output_contents[0] == to_raw(arrays[rows], datatype)
        assert len(on_threads) == 1, "the larger one"


def test_a_core_that_drains_waits_for_what_is_written() -> None:
    async def run() -> list[bytes | InferenceError]:
        replies: list[bytes | InferenceError] = []
        core = InferenceCore([])
        view = RestrictedCore(core, lambda _: True)
        for each in (core, view):
            DeferredResponse(where, replies.append, each.wait_for).done(LONG)
        await core.drain()
        return replies

    assert len(asyncio.run(run())) == 2
