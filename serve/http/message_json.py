"""Protobuf messages as the JSON that Triton's REST interface has: fields under their own names, all numbers as numbers.

protobuf's JSON mapping writes 64-bit numbers as text; clients of this interface expect numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

_WIDE = {FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64}


def to_json(message: Message) -> dict[str, Any]:
    """The message, with fields that hold their default too."""
    content = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    _widen(content, message.DESCRIPTOR)
    return content


def _widen(content: dict[str, Any], descriptor: Any) -> None:
    for field in descriptor.fields:
        if field.name in content:
            convert = _converter(field)
            if convert is not None:
                content[field.name] = _applied(convert, field, content[field.name])


def _converter(field: Any) -> Callable[[Any], Any] | None:
    inner = field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        return _converter(inner.fields_by_name["value"])
    if field.cpp_type in _WIDE:
        return int
    if inner is None:
        return None

    def convert(content: dict[str, Any]) -> dict[str, Any]:
        _widen(content, inner)
        return content

    return convert


def _applied(convert: Callable[[Any], Any], field: Any, value: Any) -> Any:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return {key: convert(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [convert(entry) for entry in value]
    return convert(value)
