"""A real server in this process: the real transport on a free port, its event loop on a thread of its own."""

from __future__ import annotations

import asyncio
import os
import resource
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.model import Model
from halfserve.serve.observability.observe_options import ObserveOptions
from halfserve.serve.protocol.forwarded_headers import ForwardedHeaders
from halfserve.serve.protocol.service import Service
from halfserve.serve.protocol.shared_memory_regions import SharedMemoryMode
from halfserve.serve.transports.grpcio_server import GrpcioServer
from halfserve.serve.transports.nghttp2.server import Nghttp2Server
from halfserve.serve.transports.transport import Transport

try:  # the loop that `halfserve serve` runs on
    from uvloop import new_event_loop
except ModuleNotFoundError:  # no wheel for Windows
    from asyncio import new_event_loop  # type: ignore[assignment]  # (the same thing of another class)

T = TypeVar("T")
WAIT_S = 60.0
MakeTransport = Callable[[Service, str, int], Transport]
TRANSPORTS: dict[str, MakeTransport] = {"nghttp2": Nghttp2Server, "grpcio": GrpcioServer}


class RunningServer:
    """What a test sees of it.

    Attributes:
        address: "127.0.0.1:port".
        core: only to be touched through `call`.
        service: likewise.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        make_models: Callable[[], Sequence[Model]],
        make_transport: MakeTransport,
        *,
        shared_memory: bool,
        shared_memory_mode: SharedMemoryMode = SharedMemoryMode.SAFE,
        observe: ObserveOptions | None = None,
        forwarded: ForwardedHeaders | None = None,
    ) -> None:
        self._loop = loop
        self._make_models = make_models
        self._make_transport = make_transport
        self._shared_memory, self._shared_memory_mode = shared_memory, shared_memory_mode
        self._observe = observe
        self._forwarded = forwarded
        self.address = ""
        self.core: InferenceCore
        self.service: Service
        self._transport: Transport
        self._has_ended = False

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the server's event loop and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    def call(self, function: Callable[[], T]) -> T:
        """Call a function on the server's event loop and return its result."""

        async def work() -> T:
            return function()

        return self.run(work())

    def until(self, reached: Callable[[], bool]) -> None:
        """Wait until something holds; each look at it is a turn of the event loop."""
        ends_s = time.monotonic() + WAIT_S
        while not self.call(reached):
            assert time.monotonic() < ends_s, "it never came about"

    async def start(self) -> None:
        self.core = InferenceCore(self._make_models())
        self.service = Service(
            self.core,
            server_version="0.0.test",
            shared_memory=self._shared_memory,
            shared_memory_mode=self._shared_memory_mode,
            observe=self._observe,
            forwarded=self._forwarded,
        )
        self._transport = self._make_transport(self.service, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{await self._transport.start()}"

    async def stop(self) -> None:
        """End it, unless it has ended: connections that are half closed are closed once."""
        if self._has_ended:
            return
        self._has_ended = True
        await self.core.drain()
        await self._transport.stop(0.1)
        self.service.observability.close()


@contextmanager
def running_server(
    make_models: Callable[[], Sequence[Model]],
    make_transport: MakeTransport = Nghttp2Server,
    *,
    shared_memory: bool = False,
    shared_memory_mode: SharedMemoryMode = SharedMemoryMode.SAFE,
    observe: ObserveOptions | None = None,
    forwarded: ForwardedHeaders | None = None,
    make_loop: Callable[[], asyncio.AbstractEventLoop] = new_event_loop,
) -> Iterator[RunningServer]:
    """Start a server on the models that `make_models` returns; stop it at the end."""
    loop = make_loop()
    thread = threading.Thread(target=loop.run_forever, name="server")
    thread.start()
    server = RunningServer(
        loop,
        make_models,
        make_transport,
        shared_memory=shared_memory,
        shared_memory_mode=shared_memory_mode,
        observe=observe,
        forwarded=forwarded,
    )
    try:
        server.run(server.start())
        try:
            yield server
        finally:
            server.run(server.stop())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(WAIT_S)
        loop.close()


@contextmanager
def few_files(spare: int) -> Iterator[None]:
    """This process can open so many files more."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + spare, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
