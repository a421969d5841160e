"""The rows of one HTTP request, each an inference request of its own, so that the model's scheduler forms the batches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from starlette.requests import ClientDisconnect, Request

from halfserve.protos.datatypes import BY_WIRE
from halfserve.protos.inference_pb2 import ModelInferResponse
from halfserve.serve.engine.errors import BackendError, InferenceError, QueueFullError, UnavailableError
from halfserve.serve.http.guards import client_of
from halfserve.serve.http.infer_route import timing_headers
from halfserve.serve.http.request_body import RequestMemory, answered_or_gone
from halfserve.serve.protocol.inference import Cancel, InferenceEntry
from halfserve.serve.transports.task_turns import task_turns

R = TypeVar("R")
R_contra = TypeVar("R_contra", contravariant=True)
Vector = NDArray[np.float32]  # (size,)
Matrix = NDArray[np.float32]  # (tokens, size)
# OpenAI's clients say so how many seconds they wait for an answer.
WAITS_HEADER = "x-stainless-read-timeout"
ROW_TIMES = "halfserve.row_times"  # key of a request's scope: the header Server-Timing of its rows, if the client asks for it
ROWS_A_STEP = 8  # queued in one step of the event loop; each takes 0.05 to 0.1 ms
LEAST_AT_ONCE = 64  # rows of one request that are queued together; a model's largest batches, four times, if that is more
BYTES_AT_ONCE = 4 * 2**20  # size limit of the messages of these rows; one row is always queued


class MessageMaker(Protocol[R_contra]):
    """Makes the inference request of one row."""

    def message(self, row: R_contra) -> bytes: ...  # a serialized ModelInferRequest


class RowRequests(Generic[R]):
    """Queues rows, a bounded number at a time, and gathers their answers in order.

    A row's message is made when the row is queued: with its padding it may be a thousand times as large as its text.
    """

    def __init__(
        self,
        entry: InferenceEntry,
        maker: MessageMaker[R],
        rows: Sequence[R],
        at_once: int,
        memory: RequestMemory,
        time_left_s: float | None,
    ) -> None:
        """Nothing is queued yet.

        Args:
            entry: takes the requests.
            maker: makes their messages.
            rows: rows to send, one in each request.
            at_once: the most to have in the queue.
            memory: counts the messages in the queue and the answers.
            time_left_s: until the client gives up; None where it has not said so.
        """
        loop = asyncio.get_running_loop()
        self._entry = entry
        self._maker = maker
        self._rows = rows
        self._at_once = at_once
        self._memory = memory
        self._deadline_s = None if time_left_s is None else loop.time() + time_left_s
        self._loop = loop
        self._turns, self._client = task_turns(), ""
        self._next = 0
        self._fills = False  # whether further rows are queued in a later step
        self._cancels: dict[int, Cancel] = {}
        self._sizes: dict[int, int] = {}  # bytes of the messages in the queue
        self._queued_bytes = 0
        self._answers: list[bytes] = [b""] * len(rows)
        self._left = len(rows)
        self.answered: asyncio.Future[None] = loop.create_future()

    async def gather(self, request: Request) -> list[bytes]:
        """Return the serialized ModelInferResponse of each row.

        Raises:
            InferenceError: a row was refused or failed; the others are cancelled.
            ClientDisconnect: the client has gone; all are cancelled.
        """
        self._client, began_ns = client_of(request.scope), time.monotonic_ns()
        self._fill()
        if not await answered_or_gone(request, self.answered, self._cancel):
            self._entry.gone(self._maker.message(self._rows[0]))
            raise ClientDisconnect
        self.answered.result()
        request.scope[ROW_TIMES] = timing_headers(request, self._answers, time.monotonic_ns() - began_ns)
        return self._answers

    def _fill(self) -> None:
        """Queue rows while there is room, in steps that take turns with those of other requests."""
        self._fills = False
        end = min(self._next + ROWS_A_STEP, len(self._rows))
        while self._has_room() and not self.answered.done():
            index = self._next
            if index == end:
                self._fill_later()
                return
            left_s = None if self._deadline_s is None else self._deadline_s - self._loop.time()
            message = self._maker.message(self._rows[index])
            try:
                self._memory.grow(len(message))
                cancel = self._entry.infer(message, left_s, _Reply(self, index))
            except QueueFullError as error:
                if not self._cancels:
                    self._fail(index, error)
                    return
                # The queue or the client's allowance is full: go on with as many as it takes.
                self._memory.shrink(len(message))
                self._at_once = len(self._cancels)
            except InferenceError as error:
                self._fail(index, error)
                return
            else:
                self._cancels[index] = cancel
                self._sizes[index] = len(message)
                self._queued_bytes += len(message)
                self._next += 1

    def _has_room(self) -> bool:
        """Return whether another row may be queued: the first always, others while neither the queue nor the memory is full."""
        if not self._cancels:
            return True
        return len(self._cancels) < self._at_once and self._queued_bytes < BYTES_AT_ONCE and not self._memory.share.is_short

    def take(self, index: int, result: bytes | InferenceError) -> None:
        """Take the answer of a row."""
        self._cancels.pop(index, None)
        if self.answered.done():
            return
        size = self._sizes.pop(index)
        self._queued_bytes -= size
        self._memory.shrink(size)
        if isinstance(result, InferenceError):
            self._fail(index, result)
            return
        try:
            self._memory.grow(len(result))
        except UnavailableError as error:
            self._fail(index, error)
            return
        self._answers[index] = result
        self._left -= 1
        if not self._left:
            self.answered.set_result(None)
        else:
            self._fill_later()

    def _fill_later(self) -> None:
        if self._next < len(self._rows) and not self._fills:
            self._fills = True
            self._turns.call_later(self._client, self._fill)

    def _fail(self, index: int, error: InferenceError) -> None:
        self._entry.failed(self._maker.message(self._rows[index]), error)
        self.answered.set_exception(error)
        self._cancel()

    def _cancel(self) -> None:
        cancels, self._cancels = self._cancels, {}
        for cancel in cancels.values():
            cancel()


class _Reply:
    """Takes the answer of one row."""

    __slots__ = ("_index", "_requests")

    def __init__(self, requests: RowRequests[Any], index: int) -> None:
        self._requests = requests
        self._index = index

    def __call__(self, result: bytes | InferenceError) -> None:
        self._requests.take(self._index, result)


def vector_of(message: bytes, model_name: str) -> Vector:
    """Return the numbers of a row's only output, as a vector of float32.

    Raises:
        BackendError: the output does not hold numbers.
    """
    return _output_of(message, model_name)[0]


def matrix_of(message: bytes, model_name: str) -> Matrix:
    """Return the numbers of a row's only output of shape [1, tokens, size], as a matrix (tokens, size) of float32.

    Raises:
        BackendError: the output does not hold numbers, or has another shape.
    """
    numbers, shape = _output_of(message, model_name)
    if len(shape) != 3 or shape[0] != 1:
        raise BackendError(
            f"model {model_name!r} answers with shape {shape}, expected a vector for each token: [1, tokens, size]"
        )
    return numbers.reshape(shape[1:])


def _output_of(message: bytes, model_name: str) -> tuple[NDArray[np.float32], list[int]]:
    response = cast("Any", ModelInferResponse.FromString(message))
    (output,), (raw,) = response.outputs, response.raw_output_contents
    datatype = BY_WIRE[output.datatype]
    if datatype.itemsize is None:
        raise BackendError(f"model {model_name!r} answers with {datatype.wire}, expected numbers")
    return np.frombuffer(raw, datatype.array_dtype).astype(np.float32), list(output.shape)


def time_left_s(request: Request) -> float | None:
    """Seconds that the client waits for its answer; None where it does not say so."""
    text = request.headers.get(WAITS_HEADER, "")
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0 < seconds < 1e9 else None
