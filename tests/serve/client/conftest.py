from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from serve.client import AsyncInferenceClient, InferenceClient
from tests.serve.client.awaited import Awaited
from tests.serve.client.scripted_server import ScriptedServer
from tests.serve.conftest import load_repository
from tests.serve.running_server import RunningServer, running_server

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


@pytest.fixture(scope="session")
def sharing(repository: Path) -> Iterator[RunningServer]:
    """A server that takes shared memory."""
    with running_server(lambda: load_repository(repository), shared_memory=True) as running:
        yield running


@pytest.fixture
def scripted() -> Iterator[ScriptedServer]:
    """A real gRPC server that answers as the test says."""
    server = ScriptedServer()
    yield server
    server.stop()
