from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from serve.client import AsyncInferenceClient, InferenceClient
from tests.serve.client.awaited import Awaited
from tests.serve.client.scripted_server import ScriptedServer

Connect = Callable[..., InferenceClient]


@pytest.fixture(params=["sync", "asyncio"])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Makes a client, of each kind in turn, that is closed at the end of the test."""
    clients: list[Any] = []
    with asyncio.Runner() as runner:

        def made(*arguments: Any, **options: Any) -> Any:
            one: Any
            if request.param == "asyncio":
                one = Awaited(runner, AsyncInferenceClient(*arguments, **options))
            else:
                one = InferenceClient(*arguments, **options)
            clients.append(one)
            return one

        yield made
        for client in clients:
            client.close()


@pytest.fixture
def scripted() -> Iterator[ScriptedServer]:
    """A real gRPC server that answers as the test says."""
    server = ScriptedServer()
    yield server
    server.stop()
