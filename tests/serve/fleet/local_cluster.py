"""A cluster on this machine: a real controller, and real agents with real servers."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

import grpc
import pytest

from halfserve import Client, RetryPolicy, Tls
from halfserve.protos.cluster_pb2 import Directory, WatchRequest
from halfserve.serve.client.channel_settings import ChannelSettings, parse_address
from halfserve.serve.fleet.agent.agent import Agent
from halfserve.serve.fleet.agent.server_process import AgentError, AgentOptions
from halfserve.serve.fleet.control.controller import Controller
from halfserve.serve.fleet.control.reports import Orders, Report
from halfserve.serve.fleet.control.wanted import Order, Wanted
from tests.serve.fleet.fleet import WAIT_S, Fleet

T = TypeVar("T")
HOST = "127.0.0.1"
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

    def _there(self) -> Controller:
        if self.controller is None:
            raise ConnectionError("gone")
        return self.controller


class LocalStore:
    """The wanted state of one group, which its agents follow."""

    def __init__(self) -> None:
        self.wanted: dict[str, Order] = {}
        self.agents: list[Agent] = []

    async def read(self, group: str) -> Wanted:
        return self.wanted

    async def change(self, group: str, orders: Wanted) -> None:
        self.wanted = {**self.wanted, **orders}
        for agent in self.agents:
            agent.follow(self.wanted)


def agent_options(folder: Path, repository: Path, *arguments: str) -> AgentOptions:
    return AgentOptions(path=str(repository), arguments=(*OPTIONS, *arguments), first_port=0, folder=folder)


class LocalCluster(Fleet):
    """Agents and controller live on an event loop of their own thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, folder: Path, repository: Path) -> None:
        self._loop = loop
        self._folder = folder
        self._repository = repository
        self._store = LocalStore()
        self._clients: dict[tuple[str, RetryPolicy], Client] = {}
        self.agents = self._store.agents
        self.link: Link

    @property
    def clients(self) -> Sequence[Client]:
        return [self.client(agent) for agent in self.agents]

    def url(self, port: str) -> str:
        agent = self.agents[0]
        return f"http://{agent.metrics_address if port == 'metrics_port' else agent.http_address}"

    def lose_one(self, ask: Callable[[Client], object]) -> None:
        with Watch(self.agents[0]) as watch:
            (killed,) = self.start(1)
            watch.until(lambda found: bool(found.get(killed.address)))
            ask(self.client(killed))
            os.kill(killed.pid, signal.SIGKILL)
            watch.until(lambda found: killed.address not in found)
        self.stop(killed)
        with pytest.raises(AgentError, match="has ended: SIGKILL"):
            killed.check()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    def start(self, count: int = 1, *arguments: str) -> list[Agent]:
        """Start agents together, which serve what they shall."""

        async def start() -> list[Agent]:
            if not self.agents:
                self.link = Link(Controller(self._store))
            options = agent_options(self._folder, self._repository, *arguments)
            started = [Agent(options, self.link) for _ in range(count)]
            self.agents += started
            await asyncio.gather(*(agent.start() for agent in started))
            await asyncio.gather(*(agent.serve(self._store.wanted) for agent in started))
            return started

        return self.run(start())

    def stop(self, *agents: Agent) -> None:
        async def stop() -> None:
            await asyncio.gather(*(agent.stop() for agent in agents))

        self.run(stop())
        for agent in agents:
            self.agents.remove(agent)

    def drain(self, agent: Agent) -> None:
        """Have the controller order that a member leaves."""

        async def drain() -> None:
            assert self.link.controller is not None
            self.link.controller.drain(agent.member)

        self.run(drain())

    def replace_controller(self) -> None:
        """Another controller, which knows nothing, takes the place of one that may be gone."""

        async def replace() -> None:
            self.link.controller = Controller(self._store)

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


class Watch:
    """What a member says of all members, now and at each change."""

    def __init__(self, agent: Agent, token: str = "", tls: Tls | None = None) -> None:
        target = parse_address(agent.address)
        settings = ChannelSettings(target=target, tls=tls, balancing="pick_first", compression=None, keepalive_s=None)
        self._channel = settings.open(grpc)
        watch = self._channel.unary_stream("/halfserve.Cluster/Watch", WatchRequest.SerializeToString, Directory.FromString)
        metadata = [("authorization", f"Bearer {token}")] if token else []
        self._directories = watch(WatchRequest(), timeout=WAIT_S, metadata=metadata)

    def until(self, reached: Callable[[dict[str, set[str]]], bool]) -> dict[str, set[str]]:
        """The models by the address of a member that serves them, once that is as expected."""
        for directory in self._directories:
            found = {one.grpc_address: set(one.models) for one in directory.members if one.state == 0}
            if reached(found):
                return found
        raise AssertionError("the watch has ended")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()


@contextmanager
def local_cluster(folder: Path, repository: Path) -> Iterator[LocalCluster]:
    """A cluster without members; they are stopped at the end."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="agents")
    thread.start()
    cluster = LocalCluster(loop, folder, repository)
    try:
        yield cluster
    finally:
        try:
            cluster.close()
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(WAIT_S)
            loop.close()
