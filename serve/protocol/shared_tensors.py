"""Where a request says that its tensors lie: the parameters of inputs and outputs in shared memory."""

from __future__ import annotations

from typing import Any

from serve.engine.errors import InvalidArgumentError
from serve.protocol.shared_memory import Place

REGION, SIZE, OFFSET = "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"
PLACE_PARAMETERS = frozenset((REGION, SIZE, OFFSET))


def place_of(what: str, parameters: Any) -> Place | None:
    """The place that a tensor's parameters name; None where it travels in the message.

    Args:
        what: opens the error's text: "input 'x'".
        parameters: the tensor's map of InferParameter.

    Raises:
        InvalidArgumentError: the parameters are incomplete or of the wrong kind.
    """
    if not parameters or not any(name in parameters for name in (REGION, SIZE, OFFSET)):
        return None
    if REGION not in parameters or SIZE not in parameters:
        missing, there = (REGION, SIZE) if REGION not in parameters else (SIZE, REGION)
        raise InvalidArgumentError(f"{what} has parameter {there} without {missing}; expected both")
    offset = _number(what, OFFSET, parameters[OFFSET]) if OFFSET in parameters else 0
    region = parameters[REGION]
    if not region.string_param:
        raise InvalidArgumentError(f"{what}: parameter {REGION} is no text, expected a region's name")
    return Place(region=region.string_param, offset=offset, byte_size=_number(what, SIZE, parameters[SIZE]))


def tell_place(parameters: Any, place: Place, byte_size: int) -> None:
    """Write into an answer's parameters where `byte_size` bytes of an output were put."""
    parameters[REGION].string_param = place.region
    parameters[SIZE].int64_param = byte_size
    if place.offset:
        parameters[OFFSET].int64_param = place.offset


def _number(what: str, name: str, parameter: Any) -> int:
    choice = parameter.WhichOneof("parameter_choice")
    number: int = getattr(parameter, choice) if choice in {"int64_param", "uint64_param"} else -1
    if number < 0:
        raise InvalidArgumentError(f"{what}: parameter {name} is no whole number of 0 or more, expected bytes as an int64")
    return number
