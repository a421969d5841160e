"""A descriptor pool of our own.

`tritonclient` registers messages of the same names in protobuf's default pool, under other file names. Two such files in one
pool are an error, whichever comes second; in a pool of our own both can be imported in one process, in either order.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

POOL = descriptor_pool.DescriptorPool()


def add_file(serialized: bytes) -> dict[str, Any]:
    """Register one serialized FileDescriptorProto and return what its `_pb2` module exports.

    Returns: the message classes and enums by name, each enum's values as constants, and DESCRIPTOR, like protoc's own modules.
    """
    file = POOL.AddSerializedFile(serialized)
    names: dict[str, Any] = {"DESCRIPTOR": file}
    for message in file.message_types_by_name.values():
        names[message.name] = message_factory.GetMessageClass(message)
    for enum in file.enum_types_by_name.values():
        names[enum.name] = EnumTypeWrapper(enum)
        names.update((value.name, value.number) for value in enum.values)
    return names
