"""Requests that a model makes to models of the same server while it computes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from halfserve.serve.engine.errors import FailedPreconditionError, InferenceError, InvalidArgumentError, UnsupportedError
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.requests import NO_PARAMETERS, InferRequest, Parameter
from halfserve.serve.engine.tensors import Array, Tensors


@dataclass(frozen=True, kw_only=True)
class ModelCall:
    """A request of a model to a model.

    Attributes:
        model: the called model's name.
        version: of it; "" for the latest.
        inputs: by name, in the shapes that clients use.
        datatypes: of the inputs, as on the wire.
        outputs: names of the wanted ones; empty for all.
        many: any number of responses is taken.
        request_id: of the request.
        parameters: of the request.
        timeout_s: seconds in the called model's queue; None for its own.
        deadline: on time.monotonic()'s clock; None without one.
        callers: models that wait for the answer, each "name/version".
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
    deadline: float | None = None
    callers: tuple[str, ...] = ()


class CallListener(Protocol):
    """Gets the responses of a call, on the event loop."""

    def respond(self, model: Model, outputs: Tensors | InferenceError, *, final: bool) -> None:
        """One of many responses; after the final one `done` is called too."""

    def done(self, model: Model | None, result: Tensors | InferenceError) -> None:
        """The answer, the error, or nothing further of many responses. The model is None where none was found."""


class RunningCall:
    """A call in progress."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._cancel: Callable[[], None] | None = None
        self._is_cancelled = False

    def cancel(self) -> None:
        """Drop the answer; any thread may do it."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._cancel_now)

    def begun(self, cancel: Callable[[], None]) -> None:
        """The request is queued; `cancel` takes it back. On the event loop."""
        self._cancel = cancel
        if self._is_cancelled:
            cancel()

    def _cancel_now(self) -> None:
        self._is_cancelled = True
        if self._cancel is not None:
            self._cancel()


class ModelCalls:
    """Lets models call models. Made on the event loop; used on any thread."""

    def __init__(self, core: InferenceCore) -> None:
        self.core = core
        self.loop = asyncio.get_running_loop()

    def soon(self, function: Callable[[], None]) -> None:
        """Call a function on the event loop."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for it
            self.loop.call_soon_threadsafe(function)

    def start(self, call: ModelCall, listener: CallListener) -> RunningCall:
        """Make a call; `listener.done` is called once, unless it is cancelled."""
        running = RunningCall(self.loop)
        self.soon(lambda: self._begin(call, listener, running))
        return running

    def _begin(self, call: ModelCall, listener: CallListener, running: RunningCall) -> None:
        model: Model | None = None
        try:
            model = found = self.core.model(call.model, call.version)
            _refuse_deadlock(call, found)
            request = _request(call, found)
            if call.many:
                request.respond = lambda outputs, final: listener.respond(found, outputs, final=final)
            request.done = lambda result: listener.done(found, result)
            self.core.submit(found, request)
        except InferenceError as error:
            listener.done(model, error)
        else:
            running.begun(lambda: found.scheduler.cancel(request))


@runtime_checkable
class CoreUser(Protocol):
    """A runtime whose models call models."""

    def connect(self, calls: ModelCalls) -> None:
        """Make calls in this way from now on."""


def _refuse_deadlock(call: ModelCall, model: Model) -> None:
    """Refuse a call that would wait for itself: each instance of the model waits for the call already, in this one chain."""
    waiting = call.callers.count(f"{model.name}/{model.version}")
    instances = len(model.batcher.instances)
    if instances and waiting >= instances:  # an ensemble has none
        raise FailedPreconditionError(
            f"model {model.name!r} is called by itself ({' -> '.join((*call.callers, model.name))}), and its {instances} "
            f"instance(s) wait for the answer already; end the cycle, or raise the count of its instance_group"
        )


def _request(call: ModelCall, model: Model) -> InferRequest:
    """The call as a checked request.

    Raises:
        InvalidArgumentError: a name, a datatype or a shape is wrong.
        UnsupportedError: the model is decoupled, and one response is wanted.
    """
    if model.is_decoupled and not call.many:
        raise UnsupportedError(
            f"model {model.name!r} is decoupled, and gives any number of responses: call it with decoupled=True"
        )
    arrays: dict[str, Array] = {}
    for name, array in call.inputs.items():
        spec = model.inputs.get(name)
        if spec is None:
            raise InvalidArgumentError(f"input {name!r} is not one of model {model.name!r}: {_names(model.inputs)}")
        if call.datatypes[name] != spec.datatype.wire:
            raise InvalidArgumentError(
                f"input {name!r} of model {model.name!r} has datatype {call.datatypes[name]!r}, expected {spec.datatype.wire!r}"
            )
        mismatch = spec.mismatch(array.shape)
        if mismatch is not None:
            raise InvalidArgumentError(f"input {name!r} of model {model.name!r} {mismatch}")
        arrays[name] = array
    missing = [name for name, spec in model.inputs.items() if name not in arrays and not spec.optional]
    if missing:
        raise InvalidArgumentError(f"missing input {_names(missing)} of model {model.name!r}")
    for name in call.outputs:
        if name not in model.outputs:
            raise InvalidArgumentError(f"output {name!r} is not one of model {model.name!r}: {_names(model.outputs)}")
    rows = _rows(arrays, model)
    turn = model.queue_policy.turn(_priority(call.parameters), call.timeout_s)
    now = time.monotonic()
    own = {name: model.inputs[name].to_model(array) for name, array in arrays.items()}
    request = InferRequest(
        own,
        tuple(call.outputs) or tuple(model.outputs),
        rows,
        model.bucket({name: array.shape for name, array in own.items()}),
        call.deadline,
        _nothing,
        turn.level,
        None if turn.delay_after_s is None else now + turn.delay_after_s,
        None if turn.drop_after_s is None else now + turn.drop_after_s,
        sum(array.nbytes for array in arrays.values()),
        None,
        call.request_id.encode(),
        call.parameters,
    )
    request.callers = call.callers
    return request


def _nothing(_: Tensors | InferenceError) -> None:
    """Replaced before the request is queued."""


def _rows(arrays: Mapping[str, Array], model: Model) -> int:
    if not model.max_batch_size:
        return 1
    sizes = {name: array.shape[0] for name, array in arrays.items()}
    rows = next(iter(sizes.values()), 0)
    if any(size != rows for size in sizes.values()) or not 1 <= rows <= model.max_batch_size:
        raise InvalidArgumentError(
            f"the inputs of model {model.name!r} have batch sizes {sizes}, expected one of 1 to {model.max_batch_size} for all"
        )
    return rows


def _priority(parameters: Mapping[str, Parameter]) -> int:
    value = parameters.get("priority", 0)
    return value if isinstance(value, int) and value >= 0 else 0


def _names(names: Sequence[str] | Mapping[str, object]) -> str:
    return ", ".join(map(repr, names))
