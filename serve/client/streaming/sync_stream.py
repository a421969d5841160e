"""A stream over a blocking channel: one thread takes requests from the caller, one takes answers from the server."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import grpc

from protos.inference_pb2 import ModelInferRequest, ModelStreamInferResponse
from serve.client.streaming.stream_order import StreamAnswer, StreamOrder

# What the caller's thread is woken with besides answers and errors.
LOOK, END = object(), object()


class SyncStream:
    """One stream, from the caller's side."""

    def __init__(self, order: StreamOrder, source: Iterable[Mapping[str, Any]], in_flight: int) -> None:
        """A stream that has not begun.

        Args:
            order: of requests and answers.
            source: the inputs of each request; gRPC's thread iterates over it.
            in_flight: how many requests may wait for their answers to be taken.
        """
        self._order = order
        self._source = source
        self._slots = threading.Semaphore(in_flight)
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._source_error: BaseException | None = None
        self._stopped = False

    def answers(self, call: Callable[[Iterator[ModelInferRequest]], Any], timeout_s: float | None) -> Iterator[StreamAnswer]:
        """Send the requests and yield their answers.

        Args:
            call: opens the RPC on an iterator of requests.
            timeout_s: seconds that the server may let requests wait without answering any; None for no limit.

        Raises:
            grpc.RpcError: the call ended with an error.
            InferenceClientError: the server broke the protocol, or is too slow.
            BaseException: what the source has raised, after the answers to what it gave before.
        """
        process, responses = os.getpid(), call(self._requests())
        reader = threading.Thread(target=self._read, args=(responses,), name="stream answers", daemon=True)
        reader.start()
        try:
            while (event := self._next_event(timeout_s)) is not END:
                if isinstance(event, ModelStreamInferResponse):
                    self._order.accept(event)
                elif isinstance(event, grpc.RpcError):
                    raise event
                for answer in self._order.ready():
                    self._slots.release()
                    yield answer
            yield from self._order.ready()
            if self._source_error is not None:
                raise self._source_error
            self._order.check_complete()
        finally:
            if os.getpid() == process:  # a fork has neither the threads nor the call
                self._stopped = True
                self._slots.release()
                responses.cancel()
                reader.join()

    def _next_event(self, timeout_s: float | None) -> Any:
        while True:
            try:
                # What has come is never late, however long the caller took to ask for it.
                waits = self._events.empty()
                if waits and self._order.is_over(timeout_s):
                    return END
                return self._events.get(waits, self._order.patience_s(timeout_s) if waits else None)
            except queue.Empty:
                continue  # patience_s knows whether anything is late

    def _requests(self) -> Iterator[ModelInferRequest]:
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
                request = self._order.request(given)
                if request is None:
                    self._events.put(LOOK)
                else:
                    yield request
        except GeneratorExit:
            raise  # gRPC takes no more requests
        except BaseException as error:  # noqa: BLE001  (raised again in the caller's thread; gRPC's would hang after it)
            self._source_error = error
        finally:
            self._order.complete()

    def _read(self, responses: Iterable[ModelStreamInferResponse]) -> None:
        try:
            for response in responses:
                self._events.put(response)
        except grpc.RpcError as error:
            self._events.put(error)
        finally:
            self._events.put(END)
