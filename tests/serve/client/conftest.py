"""Clients of both kinds behind one synchronous interface, so that one suite tests both."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from halfserve import AsyncClient, Client
from tests.serve.client.scripted_server import ScriptedServer

Connect = Callable[..., Client]


class Awaited:
    """Stands for a client or a model handle, and has the synchronous one's methods."""

    def __init__(self, runner: asyncio.Runner, inner: Any) -> None:
        self._runner = runner
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        if not inspect.ismethod(attribute):
            return attribute
        return lambda *arguments, **options: self._finished(attribute(*arguments, **options))

    def __repr__(self) -> str:
        return repr(self._inner)

    def _finished(self, result: Any) -> Any:
        if inspect.isasyncgen(result):
            return self._iterated(result)
        if hasattr(result, "__aenter__"):
            return self._entered(result)
        if inspect.isawaitable(result):
            result = self._runner.run(_value(result))
        return Awaited(self._runner, result) if hasattr(result, "infer") else result

    def _iterated(self, generator: Any) -> Iterator[Any]:
        try:
            while True:
                try:
                    yield self._runner.run(_value(anext(generator)))
                except StopAsyncIteration:
                    return
        finally:
            self._runner.run(generator.aclose())

    @contextmanager
    def _entered(self, manager: Any) -> Iterator[Any]:
        entered = self._runner.run(_value(manager.__aenter__()))
        try:
            yield entered
        except BaseException as error:
            self._runner.run(_value(manager.__aexit__(type(error), error, error.__traceback__)))
            raise
        else:
            self._runner.run(_value(manager.__aexit__(None, None, None)))


async def _value(awaitable: Any) -> Any:
    return await awaitable


@pytest.fixture(params=["sync", "asyncio"])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Makes a client, of each kind in turn, that is closed at the end of the test."""
    clients: list[Any] = []
    with asyncio.Runner() as runner:

        def made(*arguments: Any, **options: Any) -> Any:
            one: Any
            if request.param == "asyncio":
                one = Awaited(runner, AsyncClient(*arguments, **options))
            else:
                one = Client(*arguments, **options)
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
