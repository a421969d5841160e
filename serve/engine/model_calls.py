"""Requests that a model makes to models of the same server while it computes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from halfserve.protos.request_parameters import PRIORITY
from halfserve.protos.triton_errors import TritonPhrase
from halfserve.serve.engine.errors import (
    DeadlineExceededError,
    InferenceError,
    InvalidArgumentError,
    NotFoundError,
    RequestCancelledError,
    UnavailableError,
    UnsupportedError,
    worded,
)
from halfserve.serve.engine.inference_core import Cancel, InferenceCore
from halfserve.serve.engine.model import Model, missing_inputs, unfit_shape
from halfserve.serve.engine.requests import NO_PARAMETERS, CallingExecution, InferRequest, Parameter
from halfserve.serve.engine.tensors import Array, Tensors
from halfserve.serve.engine.whole_requests import left_error


@dataclass(frozen=True, kw_only=True)
class ModelCall:
    """A model's request to another model.

    Attributes:
        model: name of the called model.
        version: version of the called model; "" for the latest.
        inputs: arrays by name, in the shapes that clients use.
        datatypes: KServe datatypes of the inputs, by name.
        outputs: names of the wanted outputs; empty for all.
        many: whether any number of responses is accepted.
        request_id: id of the request.
        parameters: parameters of the request.
        timeout_s: seconds in the called model's queue; None for that model's own timeout.
        caller: the execution that makes the call; None for a model that computes nothing now.
    """

    model: str
    version: str
    inputs: Mapping[str, Array]
    datatypes: Mapping[str, str]
    outputs: Sequence[str] = ()
    many: bool = False
    request_id: str = ""
    parameters: Mapping[str, Parameter] = field(default_factory=lambda: NO_PARAMETERS)
    timeout_s: float | None = None
    caller: CallingExecution | None = None


class CallListener(Protocol):
    """Gets the responses of a call, on the event loop."""

    def respond(self, model: Model, outputs: Tensors | InferenceError, *, final: bool, read: Callable[[], None]) -> None:
        """Take one of many responses; after the final one `done` is called too. `read`: see `InferRequest.respond`."""

    def done(self, model: Model | None, result: Tensors | InferenceError) -> None:
        """Take the answer, the error, or the end of many responses. The model is None if none was found."""


class RunningCall:
    """A call in progress. Used on the event loop only, except for `cancel`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, caller: CallingExecution | None, listener: CallListener) -> None:
        self._loop = loop
        self._caller = caller
        self._listener = listener
        self._model: Model | None = None
        self._request: InferRequest | None = None  # set once it is queued
        self._end_wait: Cancel | None = None  # while it waits for the load of its model
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False

    def cancel(self) -> None:
        """Discard the answer; may be called on any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._drop)

    def withdraw(self) -> None:
        """Ask the called model to end its work. Its responses still come; one that cannot be asked is cancelled."""
        if self._request is not None and self._request.progress is not None:
            self._request.progress.withdraw()
        elif self._request is not None or self._end_wait is not None:
            self.end(RequestCancelledError("the call was cancelled by the model that made it"))

    def queued(self, model: Model, request: InferRequest) -> None:
        """Note the queued request whose answer the call waits for."""
        self._model, self._request = model, request
        if self._is_over:
            self._drop()
            return
        if self._caller is not None:
            self._caller.calls.add(self)
        if request.deadline is not None:
            self._timer = self._loop.call_later(max(0.0, request.deadline - time.monotonic()), self._too_late)

    def waits(self, end_wait: Cancel) -> None:
        """Note that it waits for the load of its model, which `end_wait` ends."""
        self._end_wait = end_wait
        if self._caller is not None:
            self._caller.calls.add(self)

    def done(self, result: Tensors | InferenceError) -> None:
        """Take the answer, the error, or the end of many responses."""
        model = self._model
        self._close()
        self._listener.done(model, result)

    def end(self, error: InferenceError, model: Model | None = None) -> None:
        """Take an error in place of the answer. `model`: the called model, if the request is not queued."""
        model = self._model or model
        self._drop()
        self._listener.done(model, error)

    def _too_late(self) -> None:
        late = DeadlineExceededError("the time of the request for which this call is made was up before its answer")
        self.end(late.like(TritonPhrase.QUEUE_TIMEOUT))

    def _drop(self) -> None:
        model, request = self._model, self._request
        self._close()
        if model is not None and request is not None:
            model.scheduler.cancel(request)

    def _close(self) -> None:
        self._is_over = True
        self._model = self._request = None  # the request refers to this call
        end_wait, self._end_wait = self._end_wait, None
        if end_wait is not None:
            end_wait()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._caller is not None:
            self._caller.calls.discard(self)


class ModelCalls:
    """Lets models call models. Made on the event loop; used on any thread."""

    def __init__(self, core: InferenceCore) -> None:
        self.core = core
        self.loop = asyncio.get_running_loop()

    def soon(self, function: Callable[[], None]) -> None:
        """Call a function on the event loop."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, so that the result is no longer needed
            self.loop.call_soon_threadsafe(function)

    def start(self, call: ModelCall, listener: CallListener) -> RunningCall:
        """Make a call; `listener.done` is called once, unless it is cancelled."""
        running = RunningCall(self.loop, call.caller, listener)
        self.soon(lambda: self._begin(call, listener, running))
        return running

    def _begin(self, call: ModelCall, listener: CallListener, running: RunningCall) -> None:
        model: Model | None = None
        try:
            if call.caller is not None and call.caller.is_left:
                raise left_error(call.caller)
            try:
                with worded(TritonPhrase.CALLED_MODEL_NOT_READY, model=call.model):
                    model = found = self.core.model(call.model, call.version)
            except (NotFoundError, UnavailableError):
                if not self._waits(call, listener, running):
                    raise
                return
            request = _request(call, found)
            if call.many:
                request.respond = lambda outputs, final, read: listener.respond(found, outputs, final=final, read=read)
            request.done = running.done
            self.core.submit(found, request)
        except InferenceError as error:
            running.end(error, model)
        else:
            running.queued(found, request)

    def _waits(self, call: ModelCall, listener: CallListener, running: RunningCall) -> bool:
        """Return whether a call waits until its model is loaded, and begins then."""
        deadline = None if call.caller is None else _deadline(call.caller)
        time_left_s = None if deadline is None else deadline - time.monotonic()

        def arrived(error: InferenceError | None) -> None:
            if error is None:
                self._begin(call, listener, running)
            else:
                running.end(error)

        end_wait = self.core.demand(call.model, time_left_s, arrived)
        if end_wait is not None:
            running.waits(end_wait)
        return end_wait is not None


@runtime_checkable
class CoreUser(Protocol):
    """A runtime whose models call models."""

    def connect(self, calls: ModelCalls) -> None:
        """Use `calls` for all calls from now on."""


def _request(call: ModelCall, model: Model) -> InferRequest:
    if model.is_decoupled and not call.many:
        raise UnsupportedError(
            f"model {model.name!r} is decoupled, and gives any number of responses: call it with decoupled=True"
        )
    arrays: dict[str, Array] = {}
    missing = [name for name, spec in model.inputs.items() if name not in call.inputs and not spec.optional]
    if missing and call.inputs.keys() <= model.inputs.keys():  # else a name that is none of the model's says more
        raise missing_inputs(f"missing input {_names(missing)} of model {model.name!r}", model, [*call.inputs], missing)
    for name, array in call.inputs.items():
        spec = model.inputs.get(name)
        if spec is None:
            text = f"input {name!r} is not one of model {model.name!r}: {_names(model.inputs)}"
            raise InvalidArgumentError(text).like(TritonPhrase.UNEXPECTED_INPUT, input=name, model=model.name)
        if call.datatypes[name] != spec.datatype.wire:
            raise InvalidArgumentError(
                f"input {name!r} of model {model.name!r} has datatype {call.datatypes[name]!r}, expected {spec.datatype.wire!r}"
            ).like(
                TritonPhrase.DATATYPE,
                input=name,
                model=model.name,
                given=call.datatypes[name],
                expected=spec.datatype.wire,
            )
        mismatch = spec.mismatch(array.shape)
        if mismatch is not None:
            raise unfit_shape(f"input {name!r} of model {model.name!r} {mismatch}", model, spec, array.shape)
        arrays[name] = array
    for name in call.outputs:
        if name not in model.outputs:
            text = f"output {name!r} is not one of model {model.name!r}: {_names(model.outputs)}"
            raise InvalidArgumentError(text).like(TritonPhrase.UNEXPECTED_OUTPUT, output=name, model=model.name)
    rows = model.rows_of({name: array.shape for name, array in arrays.items()}, f"model {model.name!r}: ")
    turn = model.queue_policy.turn(_priority(call.parameters), call.timeout_s)
    now = time.monotonic()
    own = {name: model.inputs[name].to_model(array) for name, array in arrays.items()}
    request = InferRequest(
        own,
        tuple(call.outputs) or tuple(model.outputs),
        rows,
        model.bucket({name: array.shape for name, array in own.items()}),
        None if call.caller is None else _deadline(call.caller),
        _nothing,
        turn.level,
        None if turn.delay_after_s is None else now + turn.delay_after_s,
        None if turn.drop_after_s is None else now + turn.drop_after_s,
        sum(array.nbytes for array in arrays.values()),
        None,
        call.request_id.encode(),
        call.parameters,
    )
    if call.caller is not None:
        request.callers = _callers(call.caller)
    return request


def _deadline(caller: CallingExecution) -> float | None:
    """Return the time at which no request of an execution needs its calls any more; None for never."""
    deadlines = [request.deadline for request in caller.requests]
    return max((moment for moment in deadlines if moment is not None), default=None) if None not in deadlines else None


def _callers(caller: CallingExecution) -> tuple[CallingExecution, ...]:
    """Return the executions that wait for the calls of an execution; the requests of its batch may have different callers."""
    before = dict.fromkeys(one for request in caller.requests for one in request.callers)
    return (*before, caller) if caller.requests else ()


def _nothing(_: Tensors | InferenceError) -> None:
    """Do nothing: replaced before the request is queued."""


def _priority(parameters: Mapping[str, Parameter]) -> int:
    value = parameters.get(PRIORITY, 0)
    return value if isinstance(value, int) and value >= 0 else 0


def _names(names: Sequence[str] | Mapping[str, object]) -> str:
    return ", ".join(map(repr, names))
