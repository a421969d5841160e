"""A stream over an asyncio channel: one task takes requests from the caller, one takes answers from the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Mapping
from typing import Any

import grpc

from protos.inference_pb2 import ModelInferRequest, ModelStreamInferResponse
from serve.client.connection.cancellation import is_cancelled
from serve.client.errors import InferenceClientError
from serve.client.streaming.stream_order import StreamAnswer, StreamOrder

Source = Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]]
# What the caller is woken with besides answers and errors.
LOOK, END = object(), object()
UNREADABLE = "an answer of the stream is no message that can be read"  # for which grpc.aio has None


class AsyncStream:
    """One stream, from the caller's side."""

    def __init__(self, order: StreamOrder, source: Source, in_flight: int) -> None:
        """A stream that has not begun.

        Args:
            order: of requests and answers.
            source: the inputs of each request.
            in_flight: how many requests may wait for their answers to be taken.
        """
        self._order = order
        self._source = source
        self._slots = asyncio.Semaphore(in_flight)
        self._events: asyncio.Queue[Any] = asyncio.Queue()
        self._source_error: BaseException | None = None

    def begin(self, call: Any) -> None:
        """Send the requests over a grpc.aio.StreamStreamCall."""
        self._call = call
        self._tasks = [asyncio.create_task(self._write(call)), asyncio.create_task(self._read(call))]

    async def answer(self, timeout_s: float | None) -> StreamAnswer | None:
        """The next answer; None after the last one.

        No generator: asyncio would close it at the loop's end while the one that the caller has left closes it too.

        Args:
            timeout_s: seconds that the server may let requests wait without answering any; None for no limit.

        Raises:
            grpc.RpcError: the call ended with an error.
            InferenceClientError: the server broke the protocol, or is too slow.
            BaseException: what the source has raised, after the answers to what it gave before.
        """
        while (answer := next(self._order.ready(), None)) is None:
            event = await self._next_event(timeout_s)
            if event is END:
                if self._source_error is not None:
                    raise self._source_error
                self._order.check_complete()
                return None
            if isinstance(event, ModelStreamInferResponse):
                self._order.accept(event)
            elif event is None:
                raise InferenceClientError(UNREADABLE, code="INTERNAL")
            elif isinstance(event, grpc.RpcError):
                raise event
        self._slots.release()
        return answer

    async def end(self) -> None:
        """End the call, if it has not ended."""
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _next_event(self, timeout_s: float | None) -> Any:
        while True:
            if not self._events.empty():
                return self._events.get_nowait()  # never late, however long the caller took to ask for it
            if self._order.is_over(timeout_s):
                return END
            try:
                async with asyncio.timeout(self._order.patience_s(timeout_s)):
                    return await self._events.get()
            except TimeoutError:
                continue  # patience_s knows whether anything is late

    async def _write(self, call: Any) -> None:
        requests = self._requests()
        try:
            async for request in requests:
                await call.write(request)
            await call.done_writing()
        except (grpc.RpcError, asyncio.InvalidStateError):
            return  # the call has ended; the reader says why
        finally:
            await requests.aclose()

    async def _requests(self) -> AsyncGenerator[ModelInferRequest]:
        try:
            inputs = _as_async(self._source)
            while True:
                await self._slots.acquire()
                try:
                    given = await anext(inputs)
                except StopAsyncIteration:
                    return
                request = self._order.request(given)
                if request is None:
                    self._events.put_nowait(LOOK)
                else:
                    yield request
        except GeneratorExit:
            raise  # the call has ended
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and is_cancelled():
                raise  # by the stream, not by its source
            self._source_error = error  # raised again where the caller waits
        finally:
            self._order.complete()

    async def _read(self, call: Any) -> None:
        try:
            while (response := await call.read()) is not grpc.aio.EOF:
                self._events.put_nowait(response)
            if await call.code() is not grpc.StatusCode.OK:
                self._events.put_nowait(await _error_of(call))
        except grpc.RpcError as error:
            self._events.put_nowait(error)
        except asyncio.CancelledError:
            # That of the call, when the client is closed, comes as grpc's own exception too.
            if is_cancelled():
                raise
            self._events.put_nowait(await _error_of(call))
        finally:
            self._events.put_nowait(END)


async def _error_of(call: Any) -> grpc.RpcError:
    # Not initial_metadata(): a call that was cancelled before any came raises instead.
    return grpc.aio.AioRpcError(await call.code(), grpc.aio.Metadata(), await call.trailing_metadata(), await call.details())


async def _as_async(source: Source) -> AsyncIterator[Mapping[str, Any]]:
    if isinstance(source, AsyncIterable):
        async for inputs in source:
            yield inputs
    else:
        for inputs in source:
            yield inputs
