"""Walk over every tensor that an ONNX message can hold, found by the message's own schema."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor
    from google.protobuf.message import Message

TENSOR = "onnx.TensorProto"


def all_tensors(message: Message) -> list[Any]:
    """Find each `onnx.TensorProto` below a message, such as a ModelProto, in a stable order.

    The fields to follow come from the message's descriptor, so no tensor is missed: initializers, both parts of sparse ones,
    attributes of all kinds, bodies, functions with their defaults, training graphs, and additions of later schemas.
    """
    found: list[Any] = []
    _collect(message, found)
    return found


def _collect(message: Message, found: list[Any]) -> None:
    followed = _followed(message.DESCRIPTOR)
    for field, value in message.ListFields():  # most attributes have few set fields: faster than checking each field
        if field.number in followed:
            items = (value,) if field.has_presence else value
            for item in items:
                if item.DESCRIPTOR.full_name == TENSOR:
                    found.append(item)
                else:
                    _collect(item, found)


@cache
def _followed(descriptor: Descriptor) -> frozenset[int]:
    """Numbers of the fields that are tensors, or messages that may hold some."""
    below = {field.number: field.message_type for field in descriptor.fields if field.message_type}
    return frozenset(number for number, inner in below.items() if _holds_tensors(inner, frozenset()))


def _holds_tensors(descriptor: Descriptor, above: frozenset[str]) -> bool:
    """Return whether a message is a tensor or may contain one. `above` are the messages around it, as graphs can contain
    graphs.
    """
    if descriptor.full_name == TENSOR:
        return True
    below = (field.message_type for field in descriptor.fields if field.message_type)
    inside = above | {descriptor.full_name}
    return any(inner.full_name not in inside and _holds_tensors(inner, inside) for inner in below)
