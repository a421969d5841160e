"""An ONNX file without its large tensors: they stay where they are, and the rest is small enough to hold.

Protobuf cannot parse a message and leave a field of it in the file. So the file is walked here by protobuf's wire format (a
key, a length, a body), and every large `raw_data` is replaced by ONNX's own words for "these bytes lie in that file, there". A
model of a gigabyte then opens in milliseconds, and its tensors are read one by one.
"""

from __future__ import annotations

from enum import Enum, auto
from pathlib import Path

import onnx

from export.files.file_window import FileWindow
from protos.varint import encoded_varint

LARGE_BYTES = 1 << 16  # from here on a tensor stays in the file
MAX_DEPTH = 64  # of bodies within bodies; deeper files are not made by any tool


class DamagedFileError(ValueError):
    """The bytes are no protobuf message, or break off in the middle of one."""


class _Message(Enum):
    MODEL = auto()
    GRAPH = auto()
    NODE = auto()
    ATTRIBUTE = auto()
    TENSOR = auto()
    RAW_DATA = auto()


# Where tensors hide, by field number (onnx.proto).
_CHILDREN = {
    _Message.MODEL: {7: _Message.GRAPH},
    _Message.GRAPH: {1: _Message.NODE, 5: _Message.TENSOR},
    _Message.NODE: {5: _Message.ATTRIBUTE},
    _Message.ATTRIBUTE: {5: _Message.TENSOR, 6: _Message.GRAPH, 10: _Message.TENSOR, 11: _Message.GRAPH},
    _Message.TENSOR: {9: _Message.RAW_DATA},
}
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}


def without_large_tensors(data: FileWindow, path: Path, *, large_bytes: int = LARGE_BYTES) -> bytes:
    """The bytes of the same model, with every tensor of `large_bytes` or more as external data in the file itself.

    Args:
        data: The ONNX file.
        path: Its path, as the location of what is left in it.
        large_bytes: Size of `raw_data` in bytes from which a tensor is left in the file. Values in the typed fields
            (`float_data`), which hardly any tool writes for large tensors, stay in the model.

    Raises:
        DamagedFileError: The bytes are no protobuf message or break off.
    """
    return _rebuilt(data, 0, len(data), _Message.MODEL, _Rules(path=str(path), large_bytes=large_bytes), 0)


class _Rules:
    def __init__(self, *, path: str, large_bytes: int) -> None:
        self.path = path
        self.large_bytes = large_bytes

    def reference(self, offset: int, length: int) -> bytes:
        """The fields of a TensorProto that say where its bytes lie."""
        entries = {"location": self.path, "offset": str(offset), "length": str(length)}
        proto = onnx.TensorProto(data_location=onnx.TensorProto.EXTERNAL)
        for key, value in entries.items():
            proto.external_data.add(key=key, value=value)
        return bytes(proto.SerializeToString(deterministic=True))


def _rebuilt(data: FileWindow, start: int, end: int, message: _Message, rules: _Rules, depth: int) -> bytes:
    if depth > MAX_DEPTH:
        raise DamagedFileError(f"its messages are nested more than {MAX_DEPTH} deep")
    rebuilt, copied, position, children = bytearray(), start, start, _CHILDREN[message]
    while position < end:
        field = position
        key, position = _varint(data, position, end)
        if key & 7 != _LENGTH:
            position = _skipped(data, position, end, key & 7)
            continue
        length, body = _varint(data, position, end)
        position = body + length
        if position > end:
            raise DamagedFileError(f"it breaks off: {position - end:,} bytes are missing")
        child = children.get(key >> 3)
        if child is None or length < rules.large_bytes:
            continue
        rebuilt += data.piece(copied, field)
        copied = position
        if child is _Message.RAW_DATA:
            rebuilt += rules.reference(body, length)
        else:
            inner = _rebuilt(data, body, position, child, rules, depth + 1)
            rebuilt += encoded_varint(key) + encoded_varint(len(inner)) + inner
    rebuilt += data.piece(copied, end)
    return bytes(rebuilt)


def _skipped(data: FileWindow, position: int, end: int, wire_type: int) -> int:
    if wire_type == _VARINT:
        return _varint(data, position, end)[1]
    if wire_type not in _FIXED_BYTES:
        raise DamagedFileError("it is no protobuf message")
    position += _FIXED_BYTES[wire_type]
    if position > end:
        raise DamagedFileError("it breaks off")
    return position


def _varint(data: FileWindow, position: int, end: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= end:
            raise DamagedFileError("it breaks off")
        byte = data.byte(position)
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise DamagedFileError("it is no protobuf message")


def length_delimited(field: int, length: int) -> bytes:
    """What precedes `length` bytes of the message, string or byte field number `field`."""
    return encoded_varint(field << 3 | _LENGTH) + encoded_varint(length)
