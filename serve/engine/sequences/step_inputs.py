"""Reads a request's sequence parameters, adds controls and states to its inputs, and takes the next states from its outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np

from halfserve.protos.request_parameters import REQUEST_PARAMETERS, SEQUENCE_END, SEQUENCE_ID, SEQUENCE_START
from halfserve.protos.triton_errors import TritonPhrase
from halfserve.serve.engine.config.sequence_batching import CORRID, END, READY, START, ControlInput, SequencePlan
from halfserve.serve.engine.errors import BackendError, InvalidArgumentError
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.sequences.sequence import SequenceId
from halfserve.serve.engine.tensors import ANY_SIZE, Array, Tensors

MAX_ID_BYTES: Final = 128  # Triton's bound
UINT64: Final = 1 << 64


class StepInputs(Mapping[str, Array]):
    """The client's inputs of a request, with controls and states added. The client's are read on the thread that computes."""

    __slots__ = ("_added", "_given")

    def __init__(self, given: Tensors, added: Tensors) -> None:
        self._given = given
        self._added = added

    def __getitem__(self, name: str) -> Array:
        array = self._added.get(name)
        return self._given[name] if array is None else array

    def __iter__(self) -> Iterator[str]:
        yield from self._given
        yield from self._added

    def __len__(self) -> int:
        return len(self._given) + len(self._added)


class ControlTensors:
    """The control inputs of one row, made once for each combination of flags."""

    def __init__(self, plan: SequencePlan) -> None:
        flags = [(kind, control) for kind in (START, END, READY) if (control := plan.control(kind)) is not None]
        self._corrid = plan.control(CORRID)
        self._flags: dict[tuple[bool, bool], Tensors] = {
            (starts, ends): {
                control.spec.name: _row(control, control.values[{START: starts, END: ends, READY: True}[kind]], plan)
                for kind, control in flags
            }
            for starts in (False, True)
            for ends in (False, True)
        }
        self._not_ready: Tensors = {control.spec.name: _row(control, control.values[False], plan) for _, control in flags}
        self._plan = plan

    def of(self, key: SequenceId, *, starts: bool, ends: bool) -> dict[str, Array]:
        """Return the controls for a row of the sequence `key`, each [1, 1], or in the model's own shape."""
        tensors = dict(self._flags[starts, ends])
        if self._corrid is not None:
            tensors[self._corrid.spec.name] = self._id(self._corrid, key)
        return tensors

    def not_ready(self) -> dict[str, Array]:
        """Return the controls for a row without a request."""
        tensors = dict(self._not_ready)
        if self._corrid is not None:
            tensors[self._corrid.spec.name] = _row(self._corrid, b"" if self.takes_text else 0, self._plan)
        return tensors

    @property
    def takes_text(self) -> bool:
        """Whether the model reads the id as a string."""
        return self._corrid is not None and self._corrid.spec.datatype.itemsize is None

    def require_fitting(self, key: SequenceId, model: str) -> None:
        """Check that the model's control takes an id of this type.

        Raises:
            InvalidArgumentError: the control takes numbers and the id is text, or the other way round.
        """
        if self._corrid is not None and isinstance(key, str) != self.takes_text:
            given, taken = ("a string", "a number") if isinstance(key, str) else ("a number", "a string")
            raise InvalidArgumentError(f"{SEQUENCE_ID} is {given}, expected {taken}: model {model!r} reads it as such")

    def _id(self, control: ControlInput, key: SequenceId) -> Array:
        if isinstance(key, str):
            return _row(control, key.encode(), self._plan)
        size = 8 * (control.spec.datatype.itemsize or 8)
        bits = np.array(key & ((1 << size) - 1), f"<u{size // 8}")  # Triton also passes the low bits
        return _row(control, bits.view(control.spec.datatype.array_dtype), self._plan)


class StateTensors:
    """The states of a model's sequences: the inputs that take them, and the outputs that carry the next ones.

    Attributes:
        sizes_vary: whether states of several sequences may not fit into one batch, because their sizes differ.
    """

    def __init__(self, plan: SequencePlan) -> None:
        self._states = plan.states
        self._batched = plan.batched
        self._outputs = tuple(state.output.name for state in plan.states)
        self._initial = tuple(state.initial for state in plan.states)
        self.sizes_vary = any(ANY_SIZE in state.input.shape[1 if plan.batched else 0 :] for state in plan.states)

    def before(self, states: tuple[Array, ...] | None) -> tuple[Array, ...]:
        """Return the states before a request, in the order of the plan; `states`: None for a new sequence."""
        return self._initial if states is None else states

    def inputs(self, states: tuple[Array, ...]) -> dict[str, Array]:
        """Return the inputs that take these states."""
        return {state.input.name: array for state, array in zip(self._states, states, strict=True)}

    def added_to(self, wanted: tuple[str, ...]) -> tuple[str, ...]:
        """Return the outputs that a client wants, and those with states."""
        return wanted + tuple([name for name in self._outputs if name not in wanted])

    def after(self, outputs: Tensors) -> tuple[Array, ...]:
        """Copy a request's states from its outputs, because a view would keep the outputs of the whole batch in memory.

        Raises:
            BackendError: a state has another shape than the configuration's.
        """
        states = []
        for name, state in zip(self._outputs, self._states, strict=True):
            array = outputs[name][-1:] if self._batched else outputs[name]
            if array.ndim != len(state.input.shape) or (self._batched and len(array) != 1):
                raise BackendError(f"the state {name!r} has shape {list(array.shape)}, expected {list(state.input.shape)}")
            states.append(array.copy())
        return tuple(states)


def _row(control: ControlInput, value: object, plan: SequencePlan) -> Array:
    own = control.spec.shape[1:] if plan.batched else control.spec.shape
    shape = tuple(1 for _ in own)
    return np.full((1, *shape) if plan.batched else shape, value, control.spec.datatype.array_dtype)


def sequence_of(request: InferRequest, model: str) -> tuple[SequenceId, bool, bool]:
    """Return the sequence that a request belongs to, whether it starts it, and whether it ends it.

    Raises:
        InvalidArgumentError: its parameters are wrong, it names no sequence, or it has several rows.
    """
    parameters = request.parameters
    key = parameters.get(SEQUENCE_ID, 0)
    starts, ends = parameters.get(SEQUENCE_START, False), parameters.get(SEQUENCE_END, False)
    if isinstance(key, bool) or not isinstance(key, (int, str)):
        raise InvalidArgumentError(f"parameter {SEQUENCE_ID!r} is {key!r}, expected {REQUEST_PARAMETERS[SEQUENCE_ID].values}")
    if not key:
        raise InvalidArgumentError(
            f"model {model!r} takes sequences: set the parameter {SEQUENCE_ID!r} to a number other than 0, or a string"
        ).like(TritonPhrase.NO_SEQUENCE_ID, model=model.partition("/")[0])
    if isinstance(key, str):
        if len(key.encode()) > MAX_ID_BYTES:
            raise InvalidArgumentError(
                f"parameter {SEQUENCE_ID!r} has {len(key.encode())} bytes, expected at most {MAX_ID_BYTES}"
            )
    elif key < 0:
        key += UINT64
    if request.rows != 1:
        raise InvalidArgumentError(
            f"the batch size is {request.rows}, expected 1: model {model!r} takes one row of a sequence at a time"
        ).like(TritonPhrase.SEQUENCE_ROWS, model=model.partition("/")[0])
    if not isinstance(starts, bool):
        raise _no_flag(SEQUENCE_START, starts)
    if not isinstance(ends, bool):
        raise _no_flag(SEQUENCE_END, ends)
    return key, starts, ends


def _no_flag(name: str, value: object) -> InvalidArgumentError:
    return InvalidArgumentError(f"parameter {name!r} is {value!r}, expected {REQUEST_PARAMETERS[name].values}")
