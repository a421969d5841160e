"""Reads `sequence_batching`: controls, states, slots and times, checked against the model file."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from halfserve.protos.datatypes import BY_CONFIG, BY_WIRE, Datatype
from halfserve.protos.model_config_pb2 import ModelConfig, ModelSequenceBatching
from halfserve.serve.engine.backend import PYTHON, ModelInterface
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.tensors import ANY_SIZE, Array, TensorSpec

Kind = ModelSequenceBatching.Control
START, READY = Kind.CONTROL_SEQUENCE_START, Kind.CONTROL_SEQUENCE_READY
END, CORRID = Kind.CONTROL_SEQUENCE_END, Kind.CONTROL_SEQUENCE_CORRID
IDLE_US: Final = 1_000_000  # Triton's default
# The datatypes of a control input, by the field that gives its values. Triton has no field for FP16 and BF16, to which a
# conversion changes FP32 inputs.
FALSE_TRUE: Final = {
    "int32_false_true": frozenset({"INT32"}),
    "fp32_false_true": frozenset({"FP32", "FP16", "BF16"}),
    "bool_false_true": frozenset({"BOOL"}),
}
ID_TYPES: Final = frozenset({"UINT64", "INT64", "UINT32", "INT32", "BYTES"})

# Reads a file with an initial state; the arguments are its name and a text that begins errors.
ReadState = Callable[[str, str], bytes]


@dataclass(frozen=True, kw_only=True)
class ControlInput:
    """An input that tells the model the place of a row in its sequence.

    Attributes:
        kind: START, READY, END or CORRID.
        spec: the model's input.
        values: the elements for false and true; empty for CORRID.
    """

    kind: int
    spec: TensorSpec
    values: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class State:
    """A tensor that a model passes from one request of a sequence to the next.

    Attributes:
        input: the model's input, batch dimension first if it has one.
        output: the model's output, batch dimension first if it has one.
        initial: value at the start of a sequence, for one row: [1, ...] with a batch dimension.
    """

    input: TensorSpec
    output: TensorSpec
    initial: Array


@dataclass(frozen=True, kw_only=True)
class SequencePlan:
    """Controls, states, slots and times of a model's sequences.

    Attributes:
        controls: the inputs that tell the model about the sequence, which the server fills.
        states: the tensors that the server keeps.
        slots: most sequences that may run at once.
        idle_s: seconds without a request after which a sequence ends.
        batched: whether the model has a batch dimension.
        aligned: whether each sequence has its own row in the batches, and a control input marks the rows that are ready.
        max_delay_s: seconds that a batch of such rows waits for more of them.
        enough_rows: number of ready rows with which it waits no longer.
        is_iterative: whether each request is a sequence, which lasts as long as the model asks for it again.
        lanes: number of copies between which the sequences are divided, because each keeps its sequences' states in itself; 1
            if any copy may compute any request.
    """

    controls: tuple[ControlInput, ...]
    states: tuple[State, ...]
    slots: int
    idle_s: float
    batched: bool
    aligned: bool = False
    max_delay_s: float = 0.0
    enough_rows: int = 1
    is_iterative: bool = False
    lanes: int = 1

    def control(self, kind: int) -> ControlInput | None:
        return next((control for control in self.controls if control.kind == kind), None)


def state_outputs(config: ModelConfig) -> frozenset[str]:
    """Return the outputs that carry states; empty for a model without sequences."""
    return frozenset(state.output_name for state in config.sequence_batching.state)


def sequence_tensors(config: ModelConfig) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """Return the inputs and outputs that `sequence_batching` describes itself: controls and states, for a model without a
    graph.

    A control or state without a datatype is left out; `sequence_plan` then reports the error.
    """
    batch = (ANY_SIZE,) if config.max_batch_size else ()
    batching = config.sequence_batching
    inputs, outputs = [], []
    for entry in batching.control_input:
        for control in entry.control[:1]:
            field = next((field for field in FALSE_TRUE if getattr(control, field)), None)
            datatype = BY_CONFIG.get(control.data_type) if field is None else BY_WIRE[field.split("_")[0].upper()]
            if datatype is not None:
                inputs.append(TensorSpec(name=entry.name, datatype=datatype, shape=(*batch, 1)))
    for state in batching.state:
        if state.data_type in BY_CONFIG:
            datatype, shape = BY_CONFIG[state.data_type], (*batch, *state.dims)
            inputs.append(TensorSpec(name=state.input_name, datatype=datatype, shape=shape))
            outputs.append(TensorSpec(name=state.output_name, datatype=datatype, shape=shape))
    return inputs, outputs


def is_aligned(config: ModelConfig) -> bool:
    """Return whether each sequence has its own row in the batches."""
    batching = config.sequence_batching
    if batching.iterative_sequence:
        return False
    ready = any(control.kind == READY for entry in batching.control_input for control in entry.control)
    return ready and config.max_batch_size > 0 and not batching.HasField("oldest")


def complete_sequences(config: ModelConfig) -> None:
    """Fill in what `sequence_batching` leaves open, as Triton does."""
    batching = config.sequence_batching
    batching.max_sequence_idle_microseconds = batching.max_sequence_idle_microseconds or IDLE_US
    if batching.HasField("oldest") and config.max_batch_size and not batching.oldest.preferred_batch_size:
        batching.oldest.preferred_batch_size.append(config.max_batch_size)


def batching_of(config: ModelConfig) -> tuple[int, tuple[int, ...]]:
    """Return the microseconds that a batch of sequences waits for more, and the preferred sizes, for the batcher.

    Raises:
        ModelLoadError: the settings contradict each other.
    """
    batching, most = config.sequence_batching, config.max_batch_size
    if is_aligned(config):  # these batches are formed before the batcher, which must not split them
        return 0, (most,)
    if batching.HasField("oldest"):
        sizes = tuple(batching.oldest.preferred_batch_size)
        # The whole batch is preferred anyway.
        return batching.oldest.max_queue_delay_microseconds, () if sizes == (most,) else sizes
    enough = _enough_rows(config)
    # Triton waits only if a utilization is asked for.
    return (batching.direct.max_queue_delay_microseconds, (enough,)) if enough > 1 else (0, ())


def _enough_rows(config: ModelConfig) -> int:
    """Return the number of ready rows with which a batch of the strategy `direct` waits no longer."""
    utilization = config.sequence_batching.direct.minimum_slot_utilization
    if not 0 <= utilization <= 1:
        raise ModelLoadError(
            f"model {config.name!r}: sequence_batching has minimum_slot_utilization {utilization:g}, expected 0 to 1"
        )
    return max(1, math.ceil(utilization * config.max_batch_size))


def sequence_plan(config: ModelConfig, interface: ModelInterface, *, source: Any, copies: int, read: ReadState) -> SequencePlan:
    """Check a configuration's `sequence_batching` against the model.

    The configuration need not be completed; `interface`: the model file's, with controls and states; `copies`: number of copies
    of the model; `read`: reads a file with an initial state.

    Raises:
        ModelLoadError: the configuration asks for something that the model does not have, or that this server does not support.
    """
    where, batching = f"{source}: sequence_batching", config.sequence_batching
    if batching.iterative_sequence and (interface.kind is not PYTHON or batching.state):
        raise ModelLoadError(
            f"{where} has iterative_sequence, expected a Python model without state: only that can ask for a request again; "
            "have clients send a request for each step"
        )
    batched = config.max_batch_size > 0
    inputs = {spec.name: spec for spec in interface.inputs}
    outputs = {spec.name: spec for spec in interface.outputs}
    controls = tuple(_control(entry, inputs, where, batched=batched) for entry in batching.control_input)
    states = tuple(_state(entry, inputs, outputs, where, batched=batched, read=read) for entry in batching.state)
    _require_once([control.kind for control in controls], where, lambda kind: f"control {Kind.Kind.Name(kind)}")
    names = [control.spec.name for control in controls] + [state.input.name for state in states]
    _require_once(names, where, lambda name: f"input {name!r}")
    _require_once([state.output.name for state in states], where, lambda name: f"output {name!r}")
    asked = batching.oldest.max_candidate_sequences
    if asked < 0:
        raise ModelLoadError(f"{where} has max_candidate_sequences {asked}, expected 1 or more, or 0 for max_batch_size")
    per_copy = asked if batching.HasField("oldest") and asked else max(1, config.max_batch_size)
    return SequencePlan(
        controls=controls,
        states=states,
        slots=per_copy * copies,
        idle_s=(batching.max_sequence_idle_microseconds or IDLE_US) / 1e6,
        batched=batched,
        aligned=is_aligned(config),
        max_delay_s=batching.direct.max_queue_delay_microseconds / 1e6 if _enough_rows(config) > 1 else 0.0,
        enough_rows=_enough_rows(config),
        is_iterative=batching.iterative_sequence,
    )


def _require_once(found: Sequence[Any], where: str, name: Callable[[Any], str]) -> None:
    twice = next((one for one in found if found.count(one) > 1), None)
    if twice is not None:
        raise ModelLoadError(f"{where} has {name(twice)} twice, expected each once; remove one")


def _control(entry: Any, inputs: dict[str, TensorSpec], where: str, *, batched: bool) -> ControlInput:
    spec = _found(entry.name, inputs, f"{where} control_input", "input")
    where = f"{where} control_input {entry.name!r}"
    if len(entry.control) != 1:
        raise ModelLoadError(f"{where} has {len(entry.control)} controls, expected one")
    (control,) = entry.control
    given = [field for field in FALSE_TRUE if getattr(control, field)]
    if control.kind == CORRID:
        datatype = BY_CONFIG.get(control.data_type)
        if given or datatype is None or datatype.wire not in ID_TYPES:
            raise ModelLoadError(
                f"{where} is CONTROL_SEQUENCE_CORRID, expected a data_type of TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 "
                "or TYPE_STRING, and no false and true values"
            )
        values: tuple[float, ...] = ()
        taken = frozenset({datatype.wire})
    else:
        if len(given) != 1 or len(getattr(control, given[0])) != 2:
            raise ModelLoadError(f"{where} needs one of {', '.join(FALSE_TRUE)}, with two values: [ 0, 1 ]")
        values, taken = tuple(map(float, getattr(control, given[0]))), FALSE_TRUE[given[0]]
    if spec.datatype.wire not in taken:
        names = " or ".join(sorted(BY_WIRE[wire].config_name for wire in taken))
        raise ModelLoadError(f"{where} is of type {names}, the model has {spec.datatype.config_name}")
    own = spec.shape[1:] if batched else spec.shape
    if math.prod(own) != 1:
        expected = [ANY_SIZE, 1] if batched else [1]
        raise ModelLoadError(f"{where} has shape {list(spec.shape)} in the model, expected {expected}: one element a row")
    return ControlInput(kind=control.kind, spec=spec, values=values)


def _state(
    entry: Any, inputs: dict[str, TensorSpec], outputs: dict[str, TensorSpec], where: str, *, batched: bool, read: ReadState
) -> State:
    given = _found(entry.input_name, inputs, f"{where} state", "input")
    where = f"{where} state {entry.input_name!r}"
    got = _found(entry.output_name, outputs, f"{where}: output_name", "output")
    dims = list(entry.dims)
    for kind, spec in (("input", given), ("output", got)):
        if spec.datatype.config != entry.data_type:
            name = BY_CONFIG[entry.data_type].config_name if entry.data_type in BY_CONFIG else "no data_type"
            raise ModelLoadError(f"{where} has {name}, the model's {kind} {spec.name!r} has {spec.datatype.config_name}")
        own = list(spec.shape[1:] if batched else spec.shape)
        if len(own) != len(dims) or any(ANY_SIZE not in {d, o} and d != o for d, o in zip(dims, own, strict=True)):
            raise ModelLoadError(
                f"{where} has dims {dims}, the model's {kind} {spec.name!r} has {list(spec.shape)}"
                + (" with the batch dimension, which dims leave out" if batched else "")
            )
    initial = _initial(entry, given.datatype, dims, where, read)
    return State(input=given, output=got, initial=initial[None] if batched else initial)


def _initial(entry: Any, datatype: Datatype, dims: list[int], where: str, read: ReadState) -> Array:
    """Return the state of a new sequence, without a batch dimension: zeros unless the configuration names a file."""
    shape = tuple(1 if size == ANY_SIZE else size for size in dims)
    if len(entry.initial_state) > 1:
        raise ModelLoadError(f"{where} has {len(entry.initial_state)} initial_states, expected one at most")
    for initial in entry.initial_state:
        given = list(initial.dims)
        fits = len(given) == len(dims) and all(g >= 0 and d in {ANY_SIZE, g} for g, d in zip(given, dims, strict=True))
        if not fits or initial.data_type != entry.data_type:
            raise ModelLoadError(
                f"{where} has an initial_state of dims {given}, expected the state's data_type and fixed sizes that fit {dims}"
            )
        shape = tuple(given)
        if initial.WhichOneof("state_data") == "data_file":
            return _from_file(read(initial.data_file, f"{where} has data_file"), datatype, shape, where)
    dtype = datatype.array_dtype
    return np.full(shape, b"", object) if dtype.hasobject else np.zeros(shape, dtype)


def _from_file(data: bytes, datatype: Datatype, shape: tuple[int, ...], where: str) -> Array:
    if datatype.itemsize is None:
        raise ModelLoadError(f"{where} is of TYPE_STRING, which is not read from files; use zero_data for empty strings")
    expected = math.prod(shape) * datatype.itemsize
    if len(data) != expected:
        raise ModelLoadError(f"{where}: its data_file has {len(data)} bytes, expected {expected} for {list(shape)}")
    return np.frombuffer(data, datatype.array_dtype).reshape(shape)


def _found(name: str, specs: dict[str, TensorSpec], where: str, kind: str) -> TensorSpec:
    if name not in specs:
        raise ModelLoadError(f"{where} names the {kind} {name!r}, the model has {', '.join(map(repr, sorted(specs)))}")
    return specs[name]
