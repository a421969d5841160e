"""The asyncio client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from functools import cached_property
from typing import Any, Self, Unpack

import grpc

from halfserve.serve.client.base import ClientBase
from halfserve.serve.client.client_connection import AsyncRunner, CallSettings, ClientOperation
from halfserve.serve.client.cluster.channel import AsyncClusterChannel
from halfserve.serve.client.errors import ClientError
from halfserve.serve.client.exchange import Answer, Pause, UnaryRpc, advance
from halfserve.serve.client.infer_exchange import RequestOptions, close_region, open_region
from halfserve.serve.client.model_handles import BoundModel, bind
from halfserve.serve.client.shared_regions import SharedRegion
from halfserve.serve.client.stream_drivers import AsyncStream, Source, is_cancelled
from halfserve.serve.client.streaming import DEFAULT_IN_FLIGHT, METHOD, StreamAnswer, prepare_stream


class AsyncClient(ClientBase, AsyncRunner):
    """A connection to a server or a cluster, for asyncio: `(await client.infer("mlp", {"x": array}))["y"]`.

    Arguments, results and errors are those of Client. It may be made outside of an event loop; it connects at the first call
    and belongs to that call's loop. Cancelling a task cancels its call on the server too.
    """

    _loop: asyncio.AbstractEventLoop | None = None

    @cached_property
    def _over(self) -> asyncio.Event:
        return asyncio.Event()  # made on the loop that the client belongs to

    async def close(self) -> None:
        """Close the connection; calls under way end as Cancelled. Closing twice does no harm."""
        self._closed = True  # set first, so that other tasks do not register again what is unregistered here
        if self._loop is asyncio.get_running_loop():
            self._over.set()
        if self._must_unregister:
            if self._loop is asyncio.get_running_loop():
                await self._channel.close()  # close first: the server does not unregister memory that a call in flight uses
            if self._loop is None or self._loop is asyncio.get_running_loop() or self._loop.is_closed():
                self._channel, self._loop = None, None
                self._rpcs.clear()
            await self._run(self._unregistering)
            self._unregistered = True
        if self._channel is not None and self._loop is asyncio.get_running_loop():
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def stream_infer(
        self,
        model: str,
        requests: Source,
        *,
        version: str = "",
        in_flight: int = DEFAULT_IN_FLIGHT,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[StreamAnswer]:
        """Run a model on many requests over one call; see `Client.stream_infer`.

        `requests` may be an asynchronous iterable. A caller that leaves the loop early should wrap the iterator in
        `contextlib.aclosing`, so that the call ends at once.
        """
        prepared = prepare_stream(self._state, model, version, in_flight, options, self.address)
        session = await self._run(lambda: self._operation(prepared))
        settings, patience_s = self._streaming(timeout_s)
        stream = AsyncStream(session, requests, in_flight)
        stream.begin(self._stream(model)(metadata=settings.headers))
        try:
            while (answer := await stream.answer(patience_s)) is not None:
                yield answer
        except grpc.RpcError as error:
            raise self._failure(error, METHOD, settings) from None
        finally:
            await stream.end()

    async def model(self, name: str, version: str = "") -> AsyncModelHandle:
        """Return a handle on one model, which knows its inputs and outputs."""
        return AsyncModelHandle(self, await self._run(lambda: self._operation(bind(self._state, name, version))))

    @asynccontextmanager
    async def shared_region(self, byte_size: int) -> AsyncIterator[SharedRegion]:
        """Shared memory for arrays that a server on this machine reads and writes; see `Client.shared_region`."""
        region = await self._run(lambda: self._operation(open_region(self._state, byte_size)))
        try:
            yield region
        finally:
            await self._run(lambda: self._closing(close_region(self._state, region)))

    async def _run(self, prepare: Callable[[], ClientOperation[Answer]]) -> Answer:
        operation = prepare()
        outcome: Any = None
        with closing(operation.exchange) as steps:
            try:
                while True:
                    outcome = await self._perform(advance(steps, outcome), operation.settings)
            except StopIteration as finished:
                result: Answer = finished.value
                return result

    async def _perform(self, step: UnaryRpc | Pause, settings: CallSettings) -> Any:
        """Carry out one step; return its answer, or the ClientError that it ended with."""
        if isinstance(step, Pause):
            with suppress(TimeoutError):
                async with asyncio.timeout(step.seconds):
                    await self._over.wait()
            return None
        try:
            return await self._ask(step, settings)
        except ClientError as error:
            return error

    def _check_usable(self, *, closing: bool = False) -> None:
        super()._check_usable(closing=closing)
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise ClientError(
                "this client has connected in another event loop, which it belongs to; make one in each asyncio.run",
                code="FAILED_PRECONDITION",
            )

    async def _ask(self, rpc: UnaryRpc, settings: CallSettings) -> Any:
        self._check_usable(closing=settings.closing)
        call = self._unary(rpc)
        timeout_s = settings.deadline.remaining_s(method=rpc.method, address=self.address)
        try:
            answer = await call(rpc, timeout=timeout_s, metadata=settings.headers, compression=settings.compression)
        except grpc.RpcError as error:
            raise self._failure(error, rpc.method, settings) from None
        except grpc.aio.UsageError as error:  # raised by grpc for a channel that another task has closed meanwhile
            raise self._closed_meanwhile(error) from None
        except asyncio.CancelledError:  # raised by grpc for a call that was under way when the channel closed
            if not self._closed or is_cancelled():
                raise
            raise self._closed_meanwhile("it was under way") from None
        return self._whole(answer, rpc.method)

    def _open_channel(self) -> Any:
        # Not in the constructor: grpc.aio ties a channel to the loop that runs when it is made.
        if self._channel is None:
            self._channel = self._new_channel(grpc.aio, AsyncClusterChannel)
        return self._channel


class AsyncModelHandle(BoundModel, AsyncRunner):
    """A model of an AsyncClient: `(await model.infer(array))["y"]`. Made by `AsyncClient.model`."""

    _client: AsyncClient

    def stream_infer(
        self,
        requests: Source,
        *,
        in_flight: int = DEFAULT_IN_FLIGHT,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[StreamAnswer]:
        """See `Client.stream_infer`."""
        return self._client.stream_infer(
            self.name, requests, version=self.version, in_flight=in_flight, timeout_s=timeout_s, **options
        )

    async def _run(self, prepare: Callable[[], ClientOperation[Answer]]) -> Answer:
        return await self._client._run(prepare)  # noqa: SLF001  (the handle is a part of its client)
