"""Requested outputs: their names, and whether they are sent, written to shared memory, or classified."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from halfserve.protos.datatypes import BY_WIRE
from halfserve.protos.inference_pb2 import ModelInferRequest, ModelInferResponse
from halfserve.serve.engine.errors import InvalidArgumentError
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.requests import Parameter, RemarkedAnswer
from halfserve.serve.engine.tensors import Array, Tensors
from halfserve.serve.protocol.shared_memory import RegionSlice, SharedMemory, slice_of

CLASSIFICATION: Final = "classification"
BYTES = BY_WIRE["BYTES"]
# Most classes in one response. Each takes 0.7 us and a hundred bytes, and a request of a hundred bytes can ask for millions.
MAX_NAMED: Final = 2**16
MANY_CLASSES: Final = 4096  # number of classes from which partitioning is faster than sorting all


@dataclass(frozen=True, kw_only=True)
class RequestedOutput:
    """An output that is written to shared memory, classified, or both."""

    place: RegionSlice | None  # its shared memory slice; None to send it
    classes: int | None  # number of best classes to name; None to answer the numbers


def requested_names(request: ModelInferRequest, model: Model) -> tuple[str, ...]:
    """Return the outputs to send, in the client's order; all outputs if it names none. Duplicates are sent once.

    Raises:
        InvalidArgumentError: the model has no such output, or an output is requested in two ways.
    """
    if not request.outputs:
        return tuple(model.outputs)
    wanted: dict[str, ModelInferRequest.InferRequestedOutputTensor] = {}
    for output in request.outputs:
        name = output.name
        if name not in model.outputs:
            known = ", ".join(map(repr, model.outputs))
            raise InvalidArgumentError(f"output {name!r} is not one of the model's: {known}")
        if wanted.setdefault(name, output) != output:
            raise InvalidArgumentError(f"output {name!r} is named twice, with other parameters; expected one way to answer it")
    return tuple(wanted)


def special_outputs(request: ModelInferRequest, model: Model, memory: SharedMemory) -> dict[str, RequestedOutput]:
    """Return the outputs of a checked request that are not simply sent, by name.

    Raises:
        InferenceError: a parameter or a slice is invalid (see `SharedMemory.check`).
    """
    wanted = {}
    for output in request.outputs:
        if not output.parameters:
            continue
        what = f"output {output.name!r}"
        place, classes = slice_of(what, output.parameters), _classes(what, output.parameters)
        if classes is not None and model.outputs[output.name].datatype is BYTES:
            raise InvalidArgumentError(
                f"{what} has datatype BYTES, expected numbers to classify by; leave {CLASSIFICATION} out"
            )
        if place is not None:
            memory.check(place)
        if place is not None or classes is not None:
            wanted[output.name] = RequestedOutput(place=place, classes=classes)
    return wanted


def _classes(what: str, parameters: Any) -> int | None:
    if CLASSIFICATION not in parameters:
        return None
    parameter = parameters[CLASSIFICATION]
    choice = parameter.WhichOneof("parameter_choice")
    count: int = getattr(parameter, choice) if choice in {"int64_param", "uint64_param"} else -1
    if count < 0:
        raise InvalidArgumentError(
            f"{what}: parameter {CLASSIFICATION} is not a whole number, expected how many classes to name"
        )
    return count or None  # 0 means none


def classify(scores: Array, count: int, labels: Sequence[str], *, batched: bool) -> Array:
    """Name the best `count` classes as "value:index" or "value:index:label": Triton's classification extension.

    Equal scores keep the order of their index; NaN comes last.

    Args:
        scores: numbers; all dimensions but the batch form one list of classes.
        count: number of classes to name, at least 1; a larger number than there are classes names all.
        labels: names of the classes by index; classes beyond the list have none.
        batched: whether the first dimension is the batch.

    Returns:
        An array of `bytes` objects of shape [rows, classes], or [classes] without a batch.

    Raises:
        InvalidArgumentError: more than MAX_NAMED classes are requested.
    """
    count_of_rows = scores.shape[0] if batched else 1
    rows = scores.reshape(count_of_rows, math.prod(scores.shape[batched:]))
    named = count_of_rows * min(count, rows.shape[1])
    if named > MAX_NAMED:
        raise InvalidArgumentError(
            f"{named} classes are asked for, expected at most {MAX_NAMED}; ask for fewer, or the numbers"
        )
    # float64 holds smaller floats exactly, but not 64-bit integers. NaN is sorted to the end.
    with np.errstate(invalid="ignore"):  # signalling NaNs raise this warning
        # ml_dtypes' bfloat16 does not have numpy's kind "f".
        values = rows if rows.dtype.kind in "iub" else rows.astype(np.float64)
        falling = ~rows if rows.dtype.kind in "iu" else -values.astype(np.float64, copy=False)
    places = _smallest(falling, count)
    found = np.take_along_axis(values, places, axis=1).ravel().tolist()
    write = "{:.6f}".format if values.dtype.kind == "f" else str
    best = np.empty(places.size, object)
    best[:] = [_text(write(value), index, labels) for value, index in zip(found, places.ravel().tolist(), strict=True)]
    return best.reshape(places.shape) if batched else best


def _smallest(rows: Array, count: int) -> Array:
    """Return the indices of the `count` smallest numbers of each row, smallest first."""
    if rows.shape[1] < max(MANY_CLASSES, 8 * count):
        return np.argsort(rows, axis=1, kind="stable")[:, :count]
    return np.array([_smallest_of_many(row, count) for row in rows], np.intp).reshape(len(rows), count)


def _smallest_of_many(row: Array, count: int) -> Array:
    last = np.partition(row, count - 1)[count - 1]
    # Among equal numbers at the boundary, lower indices come first.
    places = np.arange(len(row)) if last != last else np.flatnonzero(row <= last)  # noqa: PLR0124  (true for NaN alone)
    return places[np.argsort(row[places], kind="stable")][:count]


def _text(score: str, index: int, labels: Sequence[str]) -> bytes:
    label = f":{labels[index]}" if index < len(labels) else ""
    return f"{score}:{index}{label}".encode()


def parameters_of(outputs: Tensors) -> bytes:
    """Return the parameters of a response as a message to append to it: protobuf merges concatenated messages.

    See https://protobuf.dev/programming-guides/encoding/#last-one-wins.
    """
    if not isinstance(outputs, RemarkedAnswer):
        return b""
    message = ModelInferResponse()
    for name, value in outputs.parameters.items():
        put_parameter(message.parameters[name], value)
    return message.SerializeToString(deterministic=True)


def put_parameter(target: Any, value: Parameter) -> None:
    """Set an InferParameter, by the kind of the value; integers are int64, larger ones uint64."""
    if isinstance(value, bool):
        target.bool_param = value
    elif isinstance(value, int):
        if value < 2**63:
            target.int64_param = value
        else:
            target.uint64_param = value
    elif isinstance(value, float):
        target.double_param = value
    else:
        target.string_param = value
