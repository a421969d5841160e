"""What only the asyncio client does."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import numpy as np
import pytest

from halfserve import AsyncClient, Cancelled, Client, ClientError
from halfserve.protos import inference_pb2 as pb
from tests.serve.client.scripted_server import ScriptedServer
from tests.serve.running_server import RunningServer

WAIT_S = 60.0


def test_many_requests_at_once_get_their_own_answers(server: RunningServer) -> None:
    x = np.random.default_rng(1).standard_normal((40, 64)).astype(np.float16)

    async def ask_all() -> list[dict[str, np.ndarray[Any, Any]]]:
        async with AsyncClient(server.address) as client:
            return await asyncio.gather(*(client.infer("mlp", {"x": row[np.newaxis]}) for row in x))

    answers = np.concatenate([outputs["y"] for outputs in asyncio.run(ask_all())])
    with Client(server.address) as client:
        one_by_one = np.concatenate([client.infer("mlp", {"x": x[i : i + 8]})["y"] for i in range(0, 40, 8)])
    np.testing.assert_allclose(answers, one_by_one, atol=2e-3)


def test_cancelling_the_task_cancels_the_call_on_the_server(scripted: ScriptedServer) -> None:
    scripted.answers["ModelInfer"] = [pb.ModelInferResponse()]
    scripted.held.add("ModelInfer")

    async def give_up() -> None:
        async with AsyncClient(scripted.address) as client:
            task = asyncio.create_task(client.infer_message(pb.ModelInferRequest()))
            assert await asyncio.to_thread(scripted.arrived.wait, WAIT_S)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            assert task.cancelled()
            assert await asyncio.to_thread(scripted.cancelled.wait, WAIT_S)

    asyncio.run(give_up())


def test_closing_ends_the_calls_under_way(scripted: ScriptedServer) -> None:
    scripted.answers["ModelInfer"] = [pb.ModelInferResponse()]
    scripted.held.add("ModelInfer")

    async def ask() -> None:
        async with AsyncClient(scripted.address) as client:
            task = asyncio.create_task(client.infer_message(pb.ModelInferRequest()))
            assert await asyncio.to_thread(scripted.arrived.wait, WAIT_S)
            await client.close()
            with pytest.raises(Cancelled, match="this client was closed during the call"):
                await task

    asyncio.run(ask())


def test_belongs_to_the_loop_of_its_first_call(server: RunningServer) -> None:
    client, x = AsyncClient(server.address), np.zeros((1, 64), np.float16)

    async def stream() -> None:
        async for _ in client.stream_infer("mlp", [{"x": x}]):
            pass

    assert asyncio.run(client.is_live())
    for call in (client.is_live(), client.infer("mlp", {"x": x}), stream()):
        with pytest.raises(ClientError, match="connected in another event loop.*; make one in each asyncio.run"):
            asyncio.run(call)
    asyncio.run(client.close())
    with pytest.raises(Cancelled, match="this client is closed"):
        asyncio.run(client.is_live())


def test_has_the_methods_of_the_synchronous_client() -> None:
    def public(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    assert public(AsyncClient) == public(Client)
    with pytest.raises(TypeError, match="unexpected keyword"):
        AsyncClient("127.0.0.1:1", timeout=3)  # type: ignore[call-arg]  # the unit belongs into the name
