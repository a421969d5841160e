"""Runs a stream over a blocking channel (threads) or an asyncio channel (tasks)."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import Any

import grpc

from halfserve.protos.inference_pb2 import ModelStreamInferResponse
from halfserve.serve.client.errors import ClientError
from halfserve.serve.client.infer_messages import LargeResponse
from halfserve.serve.client.streaming import StreamAnswer, StreamSession

Source = Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]]
# Events besides answers and errors: a request was answered without being sent; the call has ended.
ANSWERED_HERE, END = object(), object()
UNREADABLE = "an answer of the stream is no message that can be read"  # grpc.aio gives None for such an answer


class SyncStream:
    """One stream: gRPC's thread takes requests from `source`, a thread of its own takes answers from the server.

    At most `in_flight` requests have answers that the caller has not taken.
    """

    def __init__(self, session: StreamSession, source: Iterable[Mapping[str, Any]], in_flight: int) -> None:
        self._session = session
        self._source = source
        self._slots = threading.Semaphore(in_flight)
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._source_error: BaseException | None = None
        self._stopped = False

    def answers(self, call: Callable[[Iterator[bytes]], Any], timeout_s: float | None) -> Iterator[StreamAnswer]:
        """Send the requests over the RPC that `call` opens, and yield their answers.

        `timeout_s` is the longest time in seconds without any answer while requests wait; None for no limit.

        Raises:
            grpc.RpcError: the call ended with an error.
            ClientError: the server broke the protocol, or is too slow.
            BaseException: an exception of the source; raised after the answers to the requests before it.
        """
        process, responses = os.getpid(), call(self._requests())
        reader = threading.Thread(target=self._read, args=(responses,), name="stream answers", daemon=True)
        reader.start()
        try:
            while (event := self._next_event(timeout_s)) is not END:
                if isinstance(event, ModelStreamInferResponse | LargeResponse):
                    self._session.accept(event)
                elif isinstance(event, grpc.RpcError):
                    raise event
                for answer in self._session.ready():
                    if answer.is_final:
                        self._slots.release()
                    yield answer
            yield from self._session.ready()
            if self._source_error is not None:
                raise self._source_error
            self._session.check_complete()
        finally:
            if os.getpid() == process:  # a forked child has neither the threads nor the call
                self._stopped = True
                self._slots.release()
                responses.cancel()
                reader.join()

    def _next_event(self, timeout_s: float | None) -> Any:
        while True:
            try:
                # An event in the queue is never late, however long the caller took to ask for it.
                waits = self._events.empty()
                if waits and self._session.is_over(timeout_s):
                    return END
                return self._events.get(waits, self._session.patience_s(timeout_s) if waits else None)
            except queue.Empty:
                continue  # patience_s raises if an answer is late

    def _requests(self) -> Iterator[bytes]:
        try:
            inputs = iter(self._source)
            while True:
                self._slots.acquire()
                if self._stopped:
                    return
                try:
                    given = next(inputs)
                except StopIteration:
                    return
                request = self._session.request(given)
                if request is None:
                    self._events.put(ANSWERED_HERE)
                else:
                    yield request
        except GeneratorExit:
            raise  # gRPC takes no more requests
        except BaseException as error:  # noqa: BLE001  (raised again in the caller's thread; gRPC's would hang after it)
            self._source_error = error
        finally:
            self._session.complete()

    def _read(self, responses: Iterable[ModelStreamInferResponse | LargeResponse]) -> None:
        try:
            for response in responses:
                self._events.put(response)
        except grpc.RpcError as error:
            self._events.put(error)
        finally:
            self._events.put(END)


class AsyncStream:
    """One stream like `SyncStream`: one task takes requests from the caller, one takes answers from the server."""

    def __init__(self, session: StreamSession, source: Source, in_flight: int) -> None:
        self._session = session
        self._source = source
        self._slots = asyncio.Semaphore(in_flight)
        self._events: asyncio.Queue[Any] = asyncio.Queue()
        self._source_error: BaseException | None = None

    def begin(self, call: Any) -> None:
        """Send the requests over a grpc.aio.StreamStreamCall."""
        self._call = call
        self._tasks = [asyncio.create_task(self._write(call)), asyncio.create_task(self._read(call))]

    async def answer(self, timeout_s: float | None) -> StreamAnswer | None:
        """Wait for the next answer; None after the last one. See `SyncStream.answers` for the time limit and errors.

        This is not a generator: asyncio would close a generator at the loop's end while a caller that left it closes it too.
        """
        while (answer := next(self._session.ready(), None)) is None:
            event = await self._next_event(timeout_s)
            if event is END:
                if self._source_error is not None:
                    raise self._source_error
                self._session.check_complete()
                return None
            if isinstance(event, ModelStreamInferResponse | LargeResponse):
                self._session.accept(event)
            elif event is None:
                raise ClientError(UNREADABLE, code="INTERNAL")
            elif isinstance(event, grpc.RpcError):
                raise event
        if answer.is_final:
            self._slots.release()
        return answer

    async def end(self) -> None:
        """End the call if it is still running."""
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _next_event(self, timeout_s: float | None) -> Any:
        while True:
            if not self._events.empty():
                return self._events.get_nowait()  # never late, however long the caller took to ask for it
            if self._session.is_over(timeout_s):
                return END
            try:
                async with asyncio.timeout(self._session.patience_s(timeout_s)):
                    return await self._events.get()
            except TimeoutError:
                continue  # patience_s raises if an answer is late

    async def _write(self, call: Any) -> None:
        requests = self._requests()
        try:
            async for request in requests:
                await call.write(request)
            await call.done_writing()
        except (grpc.RpcError, asyncio.InvalidStateError):
            return  # the call has ended; the reader reports why
        finally:
            await requests.aclose()

    async def _requests(self) -> AsyncGenerator[bytes]:
        try:
            inputs = _as_async(self._source)
            while True:
                await self._slots.acquire()
                try:
                    given = await anext(inputs)
                except StopAsyncIteration:
                    return
                request = self._session.request(given)
                if request is None:
                    self._events.put_nowait(ANSWERED_HERE)
                else:
                    yield request
        except GeneratorExit:
            raise  # the call has ended
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and is_cancelled():
                raise  # the stream was cancelled, not its source
            self._source_error = error  # raised again in the caller's task
        finally:
            self._session.complete()

    async def _read(self, call: Any) -> None:
        try:
            while (response := await call.read()) is not grpc.aio.EOF:  # pyright: ignore[reportAttributeAccessIssue]  (its stubs)
                self._events.put_nowait(response)
            if await call.code() is not grpc.StatusCode.OK:
                self._events.put_nowait(await _error_of(call))
        except grpc.RpcError as error:
            self._events.put_nowait(error)
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            self._events.put_nowait(await _error_of(call))  # raised by grpc for a call whose client is closed
        finally:
            self._events.put_nowait(END)


def is_cancelled() -> bool:
    """Return whether the running task itself was cancelled, not only the call that it awaits; asyncio has one exception for
    both.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _error_of(call: Any) -> grpc.RpcError:
    # Not initial_metadata(): it raises for a call that was cancelled before any arrived.
    return grpc.aio.AioRpcError(await call.code(), grpc.aio.Metadata(), await call.trailing_metadata(), await call.details())


async def _as_async(source: Source) -> AsyncIterator[Mapping[str, Any]]:
    if isinstance(source, AsyncIterable):
        async for inputs in source:
            yield inputs
    else:
        for inputs in source:
            yield inputs
