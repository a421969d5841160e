from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from serve.client import AsyncInferenceClient, InferenceClient
from tests.serve.client.scripted_server import ScriptedServer

Connect = Callable[..., InferenceClient]


class Awaited:
    """The asyncio client with each coroutine run to its end, so that one suite tests both clients."""

    def __init__(self, runner: asyncio.Runner, *arguments: Any, **options: Any) -> None:
        self._runner = runner
        self._client = AsyncInferenceClient(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._client, name)
        if not inspect.iscoroutinefunction(attribute):
            return attribute
        return lambda *arguments, **options: self._runner.run(attribute(*arguments, **options))


@pytest.fixture(params=["sync", "asyncio"])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Makes a client, of each kind in turn, that is closed at the end of the test."""
    clients: list[Any] = []
    with asyncio.Runner() as runner:

        def made(*arguments: Any, **options: Any) -> Any:
            one = InferenceClient(*arguments, **options)
            if request.param == "asyncio":
                one.close()
                one = Awaited(runner, *arguments, **options)  # type: ignore[assignment]  # it has the same methods
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
