"""Real servers in this process as members of a cluster whose directory the test writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from halfserve import Client
from halfserve.protos.cluster_pb2 import Directory, Member, WatchRequest
from halfserve.serve.client.cluster.directory import WATCH
from halfserve.serve.protocol.rpc import Rpc, RpcCall
from tests.serve.conftest import load_repository
from tests.serve.running_server import RunningServer, running_server

SERVING, DRAINING = Member.SERVING, Member.DRAINING


def member(address: str, state: Member.State = SERVING, models: Sequence[str] = ("mlp",), *, http_address: str = "") -> Member:
    return Member(id=f"id of {address}", grpc_address=address, http_address=http_address, state=state, models=models)


class Board:
    """A directory, and the Watch calls that each change is sent to."""

    def __init__(self) -> None:
        self.directory = Directory()
        self._watchers: set[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = set()

    @property
    def watched(self) -> set[str]:
        """The addresses of the servers that have a Watch call to answer."""
        return {address for address, _, _ in self._watchers}

    def publish(self, *members: Member, version: int | None = None) -> None:
        """Let these be the members."""
        self.directory = Directory(version=version or self.directory.version + 1, members=members)
        for _, loop, changed in tuple(self._watchers):
            loop.call_soon_threadsafe(changed.set)

    async def watch(self, address: str, requests: AsyncIterator[WatchRequest], call: RpcCall) -> None:
        """Answer Watch at the server of this address."""
        async for _ in requests:
            changed = asyncio.Event()
            watcher = (address, asyncio.get_running_loop(), changed)
            self._watchers.add(watcher)
            try:
                while True:
                    changed.clear()
                    await call.send(self.directory)
                    await changed.wait()
            finally:
                self._watchers.discard(watcher)


class Cluster:
    """Members that answer Watch with one board's directory.

    Attributes:
        servers: the members, in the order of their start.
        board: what they answer.
    """

    def __init__(self, repository: Path, stack: ExitStack) -> None:
        self._repository = repository
        self._stack = stack
        self.servers: list[RunningServer] = []
        self.board = Board()

    @property
    def address(self) -> str:
        return "cluster://" + ",".join(server.address for server in self.servers)

    def start(self, *, shared_memory: bool = False) -> RunningServer:
        """A server that is not yet in the directory."""
        server = self._stack.enter_context(
            running_server(lambda: load_repository(self._repository), shared_memory=shared_memory)
        )
        watch = Rpc(WATCH, WatchRequest, partial(self.board.watch, server.address), is_stream=True)
        server.call(lambda: server.service.rpcs.update({WATCH: watch}))
        self.servers.append(server)
        return server

    def publish_all(self) -> None:
        """Let all servers be members that serve the model "mlp"."""
        self.board.publish(*(member(server.address) for server in self.servers))


@contextmanager
def cluster_of(repository: Path, count: int, *, shared_memory: bool = False) -> Iterator[Cluster]:
    with ExitStack() as stack:
        cluster = Cluster(repository, stack)
        for _ in range(count):
            cluster.start(shared_memory=shared_memory)
        cluster.publish_all()
        yield cluster


def answered(server: RunningServer) -> int:
    """How many requests for the model "mlp" a server has answered."""
    return answered_at(server.address)


def answered_at(address: str) -> int:
    with Client(address) as client:
        return sum(version.inference_count for version in client.statistics("mlp"))
