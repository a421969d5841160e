"""A cluster on this machine: a real controller, and real agents with real servers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from halfserve import Client, RetryPolicy
from halfserve.serve.cluster.agent import Agent, AgentOptions
from halfserve.serve.cluster.controller import Controller, ControllerOptions
from halfserve.serve.cluster.reports import Orders, Report

T = TypeVar("T")
HOST, WAIT_S = "127.0.0.1", 60.0
OPTIONS = ("--cpu", "--warm-up-seconds", "0", "--lame-duck-seconds", "0")
ONCE = RetryPolicy(retries=0)
PATIENT = RetryPolicy(initial_backoff_s=0.05, max_backoff_s=0.2, wait_for_server=True)


class Link:
    """The way to a controller that may be gone, and replaced by another one."""

    def __init__(self, controller: Controller) -> None:
        self.controller: Controller | None = controller

    async def exchange(self, report: Report) -> Orders:
        return await self._there().exchange(report)

    async def call(self, path: str, request: bytes) -> bytes:
        return await self._there().call(path, request)

    async def metrics(self) -> tuple[bytes, str]:
        return await self._there().metrics()

    def _there(self) -> Controller:
        if self.controller is None:
            raise ConnectionError("gone")
        return self.controller


class LocalCluster:
    """Agents and controller live on an event loop of their own thread.

    Attributes:
        agents: those that have been started, and not stopped.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, folder: Path, repository: Path, options: ControllerOptions) -> None:
        self._loop = loop
        self._folder = folder
        self._repository = repository
        self._options = options
        self._clients: dict[tuple[str, RetryPolicy], Client] = {}
        self.agents: list[Agent] = []
        self.link: Link

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    def start(self, count: int = 1, *arguments: str) -> list[Agent]:
        """Start agents together, which serve what they shall."""

        async def start() -> list[Agent]:
            if not self.agents:
                self.link = Link(Controller(self._options))
            started = [Agent(self.agent_options(*arguments), self.link) for _ in range(count)]
            self.agents += started
            await asyncio.gather(*(agent.start() for agent in started))
            return started

        return self.run(start())

    def agent_options(self, *arguments: str) -> AgentOptions:
        return AgentOptions(
            path=str(self._repository), cluster="test", arguments=(*OPTIONS, *arguments), first_port=0, folder=self._folder
        )

    def stop(self, *agents: Agent) -> None:
        async def stop() -> None:
            await asyncio.gather(*(agent.stop() for agent in agents))

        self.run(stop())
        self.agents = [agent for agent in self.agents if agent not in agents]

    def replace_controller(self) -> None:
        """Another controller, which knows nothing, takes the place of one that may be gone."""

        async def replace() -> None:
            self.link.controller = Controller(self._options)

        self.run(replace())

    def client(self, agent: Agent, retries: RetryPolicy = PATIENT) -> Client:
        """A client of one member, closed with the cluster."""
        key = agent.address, retries
        if key not in self._clients:
            self._clients[key] = Client(agent.address, timeout_s=WAIT_S, retries=retries)
        return self._clients[key]

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
        self.stop(*self.agents)


@contextmanager
def local_cluster(folder: Path, repository: Path, options: ControllerOptions | None = None) -> Iterator[LocalCluster]:
    """A cluster without members; they are stopped at the end."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="agents")
    thread.start()
    cluster = LocalCluster(loop, folder, repository, options or ControllerOptions())
    try:
        yield cluster
    finally:
        try:
            cluster.close()
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(WAIT_S)
            loop.close()
