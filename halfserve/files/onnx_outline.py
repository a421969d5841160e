"""An ONNX file without its large tensors: they stay in the file, and the rest is small enough for memory.

Protobuf cannot parse a message and leave a field of it in the file. This module walks through the file by protobuf's wire
format (a key, a length, a body) and replaces each large `raw_data` by its location in the file. A model of a gigabyte then
opens in milliseconds, and its tensors are read one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import BinaryIO, Generic, TypeVar

from google.protobuf.message import Message

from halfserve.files.varint import FIXED32, FIXED64, LENGTH, VARINT, encoded_varint, length_delimited

M = TypeVar("M", bound=Message)

LARGE_BYTES = 4096  # a page of memory: the runtime can map a weight of this size from a file of its own
MAX_DEPTH = 64  # limit on nested bodies; no tool writes deeper files
# A walk through this many fields takes a second. No exporter writes so many; protobuf is faster and parses such a file whole.
MAX_FIELDS = 1 << 18
WINDOW_BYTES = 1 << 16

_FIXED_BYTES = {FIXED64: 8, FIXED32: 4}
_NO_MESSAGE = "it is no protobuf message"


class DamagedFileError(ValueError):
    """The bytes are not a protobuf message, or end within one."""


@dataclass(frozen=True)
class ByteRange:
    """Location of a weight's bytes in the file."""

    offset: int  # offset from the file's start in bytes
    length: int  # length in bytes


@dataclass(frozen=True, kw_only=True)
class OnnxOutline(Generic[M]):
    """A model without the bytes of its large weights."""

    model: M  # the ModelProto; large weights lack `raw_data`
    left_out: Mapping[int, ByteRange]  # locations of these bytes, by the weight's index among the main graph's initializers


def read_outline(file: BinaryIO, size: int, model: type[M]) -> OnnxOutline[M]:
    """Read a model, onnx.ModelProto, from a seekable file at its beginning, without the main graph's large weights.

    Raises:
        DamagedFileError: the file is no protobuf message, or ends within one.
        google.protobuf.message.DecodeError: a field has the wrong type.
        OSError: the file cannot be read.
    """
    walker = _Walker(FileWindow(file, size), _MAIN_GRAPH, large_bytes=LARGE_BYTES, max_fields=MAX_FIELDS)
    try:
        content = walker.model()
    except _ManyFieldsError:
        file.seek(0)
        return OnnxOutline(model=model.FromString(file.read()), left_out={})
    return OnnxOutline(model=model.FromString(content), left_out=walker.left_out)


def without_large_tensors(file: BinaryIO, size: int, location: str, *, large_bytes: int) -> bytes:
    """Serialize a model with every large tensor, also those in bodies, as external data at `location`, the file's path.

    A `raw_data` of at least `large_bytes` stays in the file. Values in typed fields (`float_data`) stay in the model; hardly
    any tool writes those for large tensors.

    Raises:
        DamagedFileError: the file is no protobuf message, or ends within one.
        OSError: the file cannot be read.
    """

    def refer(place: ByteRange) -> bytes:
        entries = {"location": location, "offset": str(place.offset), "length": str(place.length)}
        return b"".join(map(_external_data, entries.items())) + encoded_varint(_DATA_LOCATION << 3 | VARINT) + b"\1"

    return _Walker(FileWindow(file, size), _ALL_GRAPHS, large_bytes=large_bytes, refer=refer).model()


@dataclass(frozen=True)
class TopLevelField:
    """Location of a field of a message in its file, as offsets in bytes."""

    number: int  # field number in the message's definition
    start: int  # offset of its key
    body: int  # offset of the content of a length-delimited field; the end of the key of any other field
    end: int  # offset after its last byte


def top_level_fields(data: FileWindow) -> Iterator[TopLevelField]:
    """Return the top-level fields of the message in a file; errors as of `FileWindow`."""
    return _Walker(data, {}, large_bytes=0).top_level_fields()


class FileWindow:
    """Random access to a file through a window of WINDOW_BYTES.

    A map would be simpler, but all mapped pages near a read count as this process's memory.

    Raises:
        DamagedFileError: A read goes beyond the file's end, or finds no protobuf message.
        OSError: The file cannot be read.
    """

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.size = size
        self._file = file
        self._start = 0
        self._window = b""

    def byte(self, position: int) -> int:
        index = position - self._start
        if not 0 <= index < len(self._window):
            self._start, self._window, index = position, self.piece(position, min(position + WINDOW_BYTES, self.size)), 0
            if not self._window:
                raise DamagedFileError("it breaks off")
        return self._window[index]

    def piece(self, start: int, end: int) -> bytes:
        self._file.seek(start)
        content = self._file.read(end - start)
        if len(content) < end - start:
            raise DamagedFileError("it breaks off")
        return content


class _Message(Enum):
    MODEL = auto()
    GRAPH = auto()
    NODE = auto()
    ATTRIBUTE = auto()
    TENSOR = auto()
    RAW_DATA = auto()


# Fields that contain tensors, by field number in onnx.proto.
_DATA_LOCATION, _EXTERNAL_DATA = 14, 13
_MAIN_GRAPH = {
    _Message.MODEL: {7: _Message.GRAPH},
    _Message.GRAPH: {5: _Message.TENSOR},
    _Message.TENSOR: {9: _Message.RAW_DATA},
}
_ALL_GRAPHS = _MAIN_GRAPH | {
    _Message.GRAPH: {1: _Message.NODE, 5: _Message.TENSOR},
    _Message.NODE: {5: _Message.ATTRIBUTE},
    _Message.ATTRIBUTE: {5: _Message.TENSOR, 6: _Message.GRAPH, 10: _Message.TENSOR, 11: _Message.GRAPH},
}


class _ManyFieldsError(Exception):
    """The file has more than MAX_FIELDS fields."""


class _Walker:
    """Copies a model's message without large tensors."""

    def __init__(
        self,
        data: FileWindow,
        children: Mapping[_Message, Mapping[int, _Message]],
        *,
        large_bytes: int,
        max_fields: int | None = None,
        refer: Callable[[ByteRange], bytes] = lambda _: b"",
    ) -> None:
        self._data = data
        self._children = children
        self._large_bytes = large_bytes
        self._fields_left = max_fields
        self._refer = refer
        self._initializers = 0
        self.left_out: dict[int, ByteRange] = {}  # bytes of the main graph by initializer index

    def model(self) -> bytes:
        return self._rebuilt(0, self._data.size, _Message.MODEL, 0)

    def top_level_fields(self) -> Iterator[TopLevelField]:
        position, end = 0, self._data.size
        while position < end:
            start = position
            key, body = self._key(position, end)
            if key & 7 == LENGTH:
                length, body = self._varint(body, end)
                position = body + length
            else:
                position = self._skipped(body, end, key & 7)
            if position > end:
                raise DamagedFileError("it breaks off")
            yield TopLevelField(number=key >> 3, start=start, body=body, end=position)

    def _rebuilt(self, start: int, end: int, message: _Message, depth: int) -> bytes:
        if depth > MAX_DEPTH:
            raise DamagedFileError(f"its messages are nested more than {MAX_DEPTH} deep")
        rebuilt, copied, position, children = bytearray(), start, start, self._children[message]
        raw_data: ByteRange | None = None
        while position < end:
            field = position
            key, position = self._key(position, end)
            if key & 7 != LENGTH:
                position = self._skipped(position, end, key & 7)
                continue
            length, body = self._varint(position, end)
            position = body + length
            if position > end:
                raise DamagedFileError("it breaks off")
            child = children.get(key >> 3)
            if child is _Message.RAW_DATA:
                raw_data = None  # if a field occurs twice, the last one counts
            # The main graph is walked even if it is small, because its initializers are counted.
            if child is not None and (length >= self._large_bytes or message is _Message.MODEL):
                rebuilt += self._data.piece(copied, field)
                copied = position
                if child is _Message.RAW_DATA:
                    raw_data = ByteRange(body, length)
                else:
                    inner = self._rebuilt(body, position, child, depth + 1)
                    rebuilt += encoded_varint(key) + encoded_varint(len(inner)) + inner
            if depth == 1 and child is _Message.TENSOR:
                self._initializers += 1
        rebuilt += self._data.piece(copied, end)
        if raw_data is not None:
            rebuilt += self._refer(raw_data)
            self.left_out[self._initializers] = raw_data
        return bytes(rebuilt)

    def _key(self, position: int, end: int) -> tuple[int, int]:
        if self._fields_left is not None:
            self._fields_left -= 1
            if self._fields_left < 0:
                raise _ManyFieldsError
        key, position = self._varint(position, end)
        if key < 8:  # field number 0
            raise DamagedFileError(_NO_MESSAGE)
        return key, position

    def _skipped(self, position: int, end: int, wire_type: int) -> int:
        if wire_type == VARINT:
            return self._varint(position, end)[1]
        if wire_type not in _FIXED_BYTES:
            raise DamagedFileError(_NO_MESSAGE)
        position += _FIXED_BYTES[wire_type]
        if position > end:
            raise DamagedFileError("it breaks off")
        return position

    def _varint(self, position: int, end: int) -> tuple[int, int]:
        value = 0
        for shift in range(0, 70, 7):
            if position >= end:
                raise DamagedFileError("it breaks off")
            byte = self._data.byte(position)
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, position
        raise DamagedFileError(_NO_MESSAGE)


def _external_data(entry: tuple[str, str]) -> bytes:
    """Encode one entry of TensorProto.external_data, a StringStringEntryProto."""
    texts = (text.encode() for text in entry)
    body = b"".join(length_delimited(number, len(text)) + text for number, text in enumerate(texts, start=1))
    return length_delimited(_EXTERNAL_DATA, len(body)) + body
