"""An ONNX file without its large weights, which stay where they are.

Protobuf parses a message as a whole, with Python's lock held: a file of 100 MB would keep the event loop waiting for 30 ms, and
as long again for every other reading of it. What is left here takes as long as the graph is large.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO

from onnx import ModelProto

from protos.varint import encoded_varint

# From here on a weight is left out: as much as a page of memory, so that the runtime can map it from a file of its own.
LARGE_BYTES = 4096

# Field numbers in onnx.proto.
GRAPH, INITIALIZER, RAW_DATA = 7, 5, 9
VARINT, FIXED64, BODY, FIXED32 = 0, 1, 2, 5
FIXED_BYTES = {FIXED64: 8, FIXED32: 4}
# A walk through so many takes a second. No exporter writes as many; protobuf, which is faster, has to do with the rest.
MAX_FIELDS = 1 << 18
BREAKS_OFF, NO_MESSAGE = "it breaks off", "it is no protobuf message"


@dataclass(frozen=True)
class Place:
    """Where a weight's bytes lie in the file."""

    offset: int
    length: int


@dataclass(frozen=True, kw_only=True)
class Outline:
    """A model, and what was left out of it.

    Attributes:
        model: whole but for the `raw_data` of large weights.
        left_out: these, by their index among the graph's initializers.
    """

    model: ModelProto
    left_out: Mapping[int, Place]


def read_outline(file: BinaryIO, size: int) -> Outline:
    """Read a model from a file but for its large weights.

    Args:
        file: at its beginning, buffered.
        size: of the file, in bytes.

    Raises:
        ValueError: it is no protobuf message, or breaks off.
        OSError: it cannot be read.
    """
    reader = _Reader(file, size)
    try:
        content = reader.model()
    except _ManyFieldsError:
        file.seek(0)
        return Outline(model=ModelProto.FromString(file.read()), left_out={})
    return Outline(model=ModelProto.FromString(bytes(content)), left_out=reader.left_out)


class _ManyFieldsError(Exception):
    """Of MAX_FIELDS and more."""


class _Reader:
    """Walks through a file by protobuf's wire format: a key, a length and a body, or a key and a number."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._size = size
        self._at = 0
        self._fields = 0
        self._initializers = 0
        self.left_out: dict[int, Place] = {}

    def model(self) -> bytearray:
        kept = bytearray()
        while self._at < self._size:
            key = self._key(kept, self._size)
            if key is not None:
                length = self._length(self._size)
                if key >> 3 == GRAPH:
                    _append(kept, key, self._graph(self._at + length))
                else:
                    _append(kept, key, self._read(length))
        return kept

    def _graph(self, end: int) -> bytearray:
        kept = bytearray()
        while self._at < end:
            key = self._key(kept, end)
            if key is None:
                continue
            length = self._length(end)
            is_weight = key >> 3 == INITIALIZER
            if is_weight and length >= LARGE_BYTES:
                _append(kept, key, self._weight(self._at + length))
            else:
                _append(kept, key, self._read(length))
            self._initializers += is_weight
        return kept

    def _weight(self, end: int) -> bytearray:
        kept = bytearray()
        while self._at < end:
            key = self._key(kept, end)
            if key is None:
                continue
            length = self._length(end)
            if key >> 3 == RAW_DATA:
                self.left_out.pop(self._initializers, None)  # of a field that is there twice, the last one counts
            if key >> 3 == RAW_DATA and length >= LARGE_BYTES:
                self.left_out[self._initializers] = Place(self._at, length)
                self._at += length
                self._file.seek(self._at)
            else:
                _append(kept, key, self._read(length))
        return kept

    def _key(self, kept: bytearray, end: int) -> int | None:
        """The key of the next field, which has a body; None once a field without one has been kept."""
        self._fields += 1
        if self._fields > MAX_FIELDS:
            raise _ManyFieldsError
        key = self._varint(end)
        kind = key & 7
        if key < 8:  # field number 0
            raise ValueError(NO_MESSAGE)
        if kind == BODY:
            return key
        if kind == VARINT:
            kept += encoded_varint(key) + encoded_varint(self._varint(end))
        elif kind in FIXED_BYTES and self._at + FIXED_BYTES[kind] <= end:
            kept += encoded_varint(key) + self._read(FIXED_BYTES[kind])
        else:
            raise ValueError(BREAKS_OFF if kind in FIXED_BYTES else NO_MESSAGE)
        return None

    def _length(self, end: int) -> int:
        length = self._varint(end)
        if self._at + length > end:
            raise ValueError(BREAKS_OFF)
        return length

    def _read(self, length: int) -> bytes:
        content = self._file.read(length)
        if len(content) < length:
            raise ValueError(BREAKS_OFF)
        self._at += length
        return content

    def _varint(self, end: int) -> int:
        value = 0
        for shift in range(0, 70, 7):
            if self._at >= end:
                raise ValueError(BREAKS_OFF)
            byte = self._read(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise ValueError(NO_MESSAGE)


def _append(kept: bytearray, key: int, body: bytes | bytearray) -> None:
    kept += encoded_varint(key)
    kept += encoded_varint(len(body))
    kept += body
