"""An inference request: its deadline and priority, the executions that wait for it, and its answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping
from time import monotonic_ns
from types import MappingProxyType
from typing import Final, Protocol

import numpy as np

from halfserve.serve.engine.errors import InferenceError
from halfserve.serve.engine.tensors import Array, Tensors

logger = logging.getLogger(__name__)


# Up to this size the whole batch is converted to bytes at once, and each answer is a slice of them.
CUT_BYTES: Final = 65_536


class BatchOutputs:
    """All outputs of one batch.

    Attributes:
        arrays: outputs by name.
        row_shapes: shape of one row of each output.
        is_large: whether the outputs together have more than CUT_BYTES.
    """

    __slots__ = ("_raw", "arrays", "is_large", "row_shapes")

    def __init__(self, arrays: Tensors, raw: dict[str, bytes | None] | None = None) -> None:
        """`raw`: the bytes of outputs by name, as far as known."""
        self.arrays = arrays
        self.row_shapes = tuple([array.shape[1:] for array in arrays.values()])
        self.is_large = sum([array.nbytes for array in arrays.values()]) > CUT_BYTES
        self._raw: dict[str, bytes | None] = {} if raw is None else raw

    def raw(self, name: str) -> bytes | None:
        """Return all elements of one output as bytes, row-major; None for a large one."""
        if name in self._raw:
            return self._raw[name]
        array = self.arrays[name]
        raw = self._raw[name] = array.tobytes() if array.nbytes <= CUT_BYTES else None
        return raw


class Answer(Mapping[str, Array]):
    """The rows of one request in a batch's outputs, by the names of the outputs that it wants."""

    __slots__ = ("_end", "_names", "_start", "batch")

    def __init__(self, batch: BatchOutputs, names: tuple[str, ...], start: int, end: int) -> None:
        """Make an answer of rows `start` to `end` (exclusive) of a batch with a batch dimension."""
        self.batch = batch
        self._names = names
        self._start = start
        self._end = end

    def __getitem__(self, name: str) -> Array:
        if name not in self._names:
            raise KeyError(name)
        return self.batch.arrays[name][self._start : self._end]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def last_row(self, names: tuple[str, ...]) -> Answer:
        """Return the answer's last row, with only these outputs."""
        return Answer(self.batch, names, self._end - 1, self._end)

    def raw(self, name: str, row_bytes: int) -> bytes | memoryview:
        """Return one output's elements in these rows as bytes, row-major; each row has `row_bytes` bytes.

        The bytes of a large batch are a view on the output.
        """
        raw = self.batch.raw(name)
        if raw is not None:
            return raw[self._start * row_bytes : self._end * row_bytes]
        return np.ascontiguousarray(self.batch.arrays[name][self._start : self._end]).reshape(-1).view(np.uint8).data


Parameter = bool | int | float | str


class RemarkedAnswer(dict[str, Array]):
    """An answer with response parameters.

    Attributes:
        parameters: response parameters, such as halfserve.precision.
    """

    def __init__(self, outputs: Tensors, parameters: Mapping[str, Parameter]) -> None:
        super().__init__(outputs)
        self.parameters = parameters


FEW_QUEUED: Final = 8  # number of an execution's requests before those that have left their queues are forgotten
Done = Callable[[Tensors | InferenceError], None]
Respond = Callable[[Tensors | InferenceError, bool, Callable[[], None]], None]
NO_PARAMETERS: Final[Mapping[str, Parameter]] = MappingProxyType({})


class InferRequest:
    """A checked request. It carries its callback, so that no table of pending futures is needed.

    Attributes:
        inputs: arrays that fit the model's specifications, all with the same number of rows.
        outputs: names of the wanted outputs, in the client's order.
        rows: size of the batch dimension; 1 for a model without one.
        bucket: requests with equal buckets can share a batch.
        deadline: time by which its answer must be there, in seconds on time.monotonic()'s clock; None for no deadline.
        priority: priority level; 0 is the most urgent.
        patience: time at which it goes behind the other requests of its level, on the same clock; None never.
        leave_by: time by which it must have left the queue for an instance, on the same clock; None for no timeout.
        done: called once on the event loop with the outputs or the error, unless the request was cancelled.
        arrived_ns: time.monotonic_ns() of the arrival.
        size: bytes that it holds until it is computed, or will then read from shared memory.
        cancelled: whether the client has gone, so that the answer is discarded.
        replayed: whether its copy of the model broke and it was queued once more.
        line: the queue's line in which the request waits; or, set by another scheduler, the object that will answer it.
        response_parameters: parameters of the response; None for none.
        id: the client's id, in UTF-8; empty for none.
        parameters: the client's parameters by name; shared by requests that give the same.
        respond: callback of a client that takes any number of responses: called on the event loop with the outputs or the error
            of each, whether it is the last one, and a function that the client calls on the event loop once it can take more;
            then `done` is called without outputs. None for a client that takes one, by `done`.
        progress: answer in progress at a decoupled model; None for none.
        callers: executions that wait for the answer, from the model that got a client's request to the one that made this
            request; empty for a client's own request and for the steps of an ensemble that a client requested.
        is_step: whether an ensemble waits for the answer.
    """

    __slots__ = (
        "arrived_ns", "bucket", "callers", "cancelled", "deadline", "done", "id", "inputs", "is_step", "leave_by", "line",
        "outputs", "parameters", "patience", "priority", "progress", "replayed", "respond", "response_parameters", "rows",
        "size",
    )  # fmt: skip

    def __init__(
        self,
        inputs: Tensors,
        outputs: tuple[str, ...],
        rows: int,
        bucket: Hashable,
        deadline: float | None,
        done: Done,
        priority: int = 0,
        patience: float | None = None,
        leave_by: float | None = None,
        size: int = 0,
        arrived_ns: int | None = None,
        request_id: bytes = b"",
        parameters: Mapping[str, Parameter] = NO_PARAMETERS,
    ) -> None:
        """Make a request that arrives now, unless `arrived_ns` gives the time."""
        self.inputs = inputs
        self.outputs = outputs
        self.rows = rows
        self.bucket = bucket
        self.deadline = deadline
        self.done = done
        self.priority = priority
        self.patience = patience
        self.leave_by = leave_by
        self.size = size
        self.arrived_ns = monotonic_ns() if arrived_ns is None else arrived_ns
        self.cancelled = False
        self.replayed = False
        self.line: object = None
        self.response_parameters: dict[str, str] | None = None
        self.id = request_id
        self.parameters = parameters
        self.respond: Respond | None = None
        self.progress: AnswerProgress | None = None
        self.callers: tuple[CallingExecution, ...] = ()
        self.is_step = False

    def derived(
        self,
        inputs: Tensors,
        outputs: tuple[str, ...],
        rows: int,
        bucket: Hashable,
        done: Done,
        priority: int,
        patience: float | None,
        leave_by: float | None,
        size: int,
    ) -> InferRequest:
        """Return a request whose answer this one waits for: it has the same deadline, id, parameters and callers. It arrives
        now.
        """
        request = InferRequest(
            inputs,
            outputs,
            rows,
            bucket,
            self.deadline,
            done,
            priority,
            patience,
            leave_by,
            size,
            None,
            self.id,
            self.parameters,
        )
        request.callers = self.callers
        request.is_step = self.is_step
        return request

    def finish(self, result: Tensors | InferenceError) -> None:
        """Deliver the result, unless cancelled. An error in the callback is logged, because it must not affect batch-mates."""
        if self.cancelled:
            return
        try:
            self.done(result)
        except Exception:
            logger.exception("an answer could not be handed over")


class AnswerProgress(Protocol):
    """The answer to a request, in progress at a decoupled model. Used on the event loop."""

    def gone(self) -> None:
        """Note that the client of the request has gone."""

    def withdraw(self) -> None:
        """Let the model see the request as cancelled; the responses that it still gives count."""


class PendingCall(Protocol):
    """A model's request to another model that has no answer yet. On the event loop only."""

    def end(self, error: InferenceError) -> None:
        """Cancel the request; the model that made it gets the error."""


class CallQueue(Protocol):
    """The queue of a model that may call models. On the event loop only."""

    def holds(self, request: InferRequest) -> bool:
        """Return whether a request has entered the queue and no execution has begun it."""
        ...

    def is_stuck(self, asking: tuple[CallingExecution, ...], seen: frozenset[CallQueue]) -> bool:
        """Return whether each copy's execution is in `asking`, or waits for a request in a queue that is stuck or in `seen`."""
        ...


class CallingExecution:
    """An execution that waits for answers to its own requests: of a model that calls models, or of an ensemble.

    Attributes:
        label: "name/version" of the model.
        requests: requests that the execution computes; empty for an ensemble, and once the execution has ended.
        calls: calls that the execution has made; on the event loop only.
        queued: requests that the execution waits for, with the queues that they have entered; on the event loop only.
    """

    __slots__ = ("_sweep_at", "calls", "label", "queued", "requests")

    def __init__(self, label: str, requests: tuple[InferRequest, ...] = ()) -> None:
        self.label = label
        self.requests = requests
        self.calls: set[PendingCall] = set()
        self.queued: list[tuple[CallQueue, InferRequest]] = []
        self._sweep_at = FEW_QUEUED

    @property
    def is_left(self) -> bool:
        """Whether the clients of all its requests have gone."""
        requests = self.requests
        return bool(requests) and all(request.cancelled for request in requests)

    def end(self) -> None:
        """Record that the execution has ended, and waits for nothing more. May be called on any thread."""
        self.requests = ()
        self.queued = []  # the requests refer to the execution

    def enter(self, queue: CallQueue, request: InferRequest) -> None:
        """Record that the execution waits for a request, which is queued now."""
        if not self.requests:
            return
        self.queued.append((queue, request))
        if len(self.queued) > self._sweep_at:
            self.queued = [(queue, request) for queue, request in self.queued if queue.holds(request)]
            self._sweep_at = 2 * len(self.queued) + FEW_QUEUED
