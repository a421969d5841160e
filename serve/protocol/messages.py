"""Request and response messages as bytes: parsing, limits, decompression, and the wire format that the hot path writes itself.

A field is a tag, and for length-delimited fields a varint length and its bytes:
https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message

from halfserve.files.varint import encoded_varint, length_delimited
from halfserve.protos.inference_pb2 import InferParameter, ModelInferRequest
from halfserve.protos.request_parameters import SEQUENCE_ID
from halfserve.serve.engine.errors import InvalidArgumentError, MessageTooLargeError
from halfserve.serve.engine.requests import Parameter
from halfserve.serve.protocol.large_bytes import join_unlocked

NUMBER, EIGHT_BYTES, WITH_LENGTH, GROUP, GROUP_END, FOUR_BYTES = range(6)
FIXED_BYTES = {EIGHT_BYTES: 8, FOUR_BYTES: 4, GROUP: 0, GROUP_END: 0}
# Fields of one message. An input of two bytes takes microseconds to parse and a hundred bytes of memory afterwards. A request
# with ten thousand inputs and ten thousand outputs stays below the limit.
MAX_FIELDS: Final = 2**15
# Fields of all its inputs and outputs together, shape sizes included: a parameter takes 0.5 us and 150 bytes.
MAX_INNER_FIELDS: Final = 2**16
REQUEST_TENSORS = {5 << 3 | WITH_LENGTH, 6 << 3 | WITH_LENGTH}
TENSOR_SHAPE: Final = 3 << 3 | WITH_LENGTH
REQUEST_ID: Final = 3 << 3 | WITH_LENGTH
REQUEST_RAW: Final = 7 << 3 | WITH_LENGTH
REQUEST_PARAMETER: Final = 4 << 3 | WITH_LENGTH
# First bytes of the parameter with a sequence's id: the key of the map's entry, and the tag of its value, whose length is 1
# byte.
SEQUENCE_ID_ENTRY: Final = b"\x0a%c%b\x12" % (len(SEQUENCE_ID), SEQUENCE_ID.encode())
INT64_ID: Final = 2 << 3 | NUMBER
STRING_ID: Final = 3 << 3 | WITH_LENGTH
RESPONSE_ID: Final = b"\x1a"
RESPONSE_RAW_TAG: Final = 6 << 3 | WITH_LENGTH
RESPONSE_RAW: Final = bytes((RESPONSE_RAW_TAG,))
STREAM_INFER: Final = 2 << 3 | WITH_LENGTH
M = TypeVar("M", bound=Message)
# zlib's wbits by coding: "deflate" means zlib's format in HTTP and gRPC, not raw deflate.
WINDOW_BITS = {"gzip": 31, "deflate": 15}
PIECE_BYTES: Final = 2**16  # compressed bytes per call: zlib copies all that follows a member's end
MAX_MEMBERS: Final = 1024  # most concatenated gzip members: an empty one takes 20 bytes and some microseconds


@dataclass(frozen=True)
class SplitRequest:
    """A request, split into its fixed and its varying bytes."""

    skeleton: bytes  # the message without its id, the value of its sequence id and its raw contents
    id: bytes  # the request's id in ASCII; empty without one
    id_offset: int  # offset of the id in the message; 0 without one
    raw: list[tuple[int, int]]  # (offset, size) of each entry of raw_input_contents in the message
    sequence: tuple[int, int] = (0, 0)  # (offset, size) of the value of the parameter sequence_id, an InferParameter


def split_request(data: bytes) -> SplitRequest | None:
    """Split a request; None if it has unusual fields or is malformed."""
    pieces: list[bytes] = []
    raw: list[tuple[int, int]] = []
    sequences: list[tuple[int, int]] = []
    request_id = b""
    position = start = id_offset = 0
    end = len(data)
    try:
        while position < end:
            tag, length, body = data[position], data[position + 1], position + 2
            if length > 0x7F:
                length, body = _varint(data, position + 1)
            # The field is not length-delimited, has a number over 15, or is a second id, which protobuf has to validate too.
            if tag & 0x87 != WITH_LENGTH or (tag == REQUEST_ID and id_offset):
                return None
            after = body + length
            hole = _hole(data, tag, position, body, after)
            if hole >= 0:
                if start != hole:
                    pieces.append(data[start:hole])
                start = after
                if tag == REQUEST_RAW:
                    raw.append((body, length))
                elif tag == REQUEST_ID:
                    request_id, id_offset = data[body:after], body
                else:
                    sequences.append((hole, after - hole))
            position = after
    except IndexError:
        return None
    # A second sequence id would replace the first.
    if position != end or not request_id.isascii() or len(sequences) > 1:
        return None
    pieces.append(data[start:])
    skeleton = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    return SplitRequest(skeleton, request_id, id_offset, raw, sequences[0] if sequences else (0, 0))


def _hole(data: bytes, tag: int, position: int, body: int, after: int) -> int:
    """Return where a field's varying bytes begin, which end with the field; -1 for a field without any."""
    if tag in (REQUEST_RAW, REQUEST_ID):
        return position
    return _sequence_value(data, body, after) if tag == REQUEST_PARAMETER else -1


def _sequence_value(data: bytes, start: int, end: int) -> int:
    """Return where the value of the parameter sequence_id begins, which ends at `end`; -1 if the entry is another parameter."""
    value = start + len(SEQUENCE_ID_ENTRY) + 1
    if data[start : value - 1] != SEQUENCE_ID_ENTRY or data[value - 1] > 0x7F or value + data[value - 1] != end:
        return -1
    return value


def sequence_id(value: bytes) -> Parameter | None:
    """Return the id in the value of the parameter sequence_id; None if the value has no id.

    Raises:
        InvalidArgumentError: it is malformed.
    """
    try:
        if value[0] == STRING_ID and value[1] == len(value) - 2:
            return value[2:].decode()
        if value[0] == INT64_ID:
            number, end = _varint(value, 1)
            if end == len(value) and number < 1 << 63:
                return number
    except (IndexError, UnicodeDecodeError):
        pass
    try:
        parameter = InferParameter.FromString(value)  # the id is negative, or the value has another type
    except DecodeError:
        raise _malformed(ModelInferRequest) from None
    choice = parameter.WhichOneof("parameter_choice")
    return getattr(parameter, choice) if choice else None


def has_too_many_fields(data: bytes) -> bool:
    """Return whether a message has more than MAX_FIELDS fields, or its tensors more than MAX_INNER_FIELDS; False if malformed.

    Fields nested more deeply, such as the elements of typed contents, are not counted.
    """
    if len(data) <= MAX_FIELDS:
        return False
    fields = inner = 0
    try:
        for tag, start, end in _fields(data, 0, len(data)):
            fields += 1
            if tag in REQUEST_TENSORS:
                inner += _inner_fields(data, start, end, MAX_INNER_FIELDS - inner)
            if fields > MAX_FIELDS or inner > MAX_INNER_FIELDS:
                return True
    except IndexError:
        pass
    return False


def _inner_fields(data: bytes, start: int, end: int, most: int) -> int:
    """Count the fields of an input or output; counting stops at `most` + 1."""
    count = 0
    for tag, body, after in _fields(data, start, end):
        count += 1 + (after - body if tag == TENSOR_SHAPE else 0)
        if count > most:
            break
    return count


def _fields(data: bytes, position: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield each field's tag, and the start and end of its content."""
    while position < end:
        tag, position = _varint(data, position)
        kind = tag & 7
        start = position
        if kind in FIXED_BYTES:
            position += FIXED_BYTES[kind]
        elif kind == NUMBER:
            _, position = _varint(data, position)
        elif kind == WITH_LENGTH:
            length, start = _varint(data, position)
            position = start + length
        else:
            raise IndexError(position)
        yield tag, start, position


def put_response(head: bytes, request_id: bytes, outputs: bytes, raw: Sequence[bytes | memoryview]) -> bytes:
    """Join a response from its serialized parts.

    Args:
        head: a message with the model's name and version.
        request_id: the request's id in ASCII.
        outputs: a message with the entries of the outputs.
        raw: the bytes of each output.
    """
    parts: list[bytes | memoryview] = [head, put_id(request_id), outputs]
    for tensor in raw:
        parts += (raw_tag(len(tensor)), tensor)
    return join_unlocked(parts)


def split_response(data: bytes, position: int = 0) -> tuple[bytes, list[memoryview]]:
    """Return a response without its raw contents, and the raw contents as views, because they may be large.

    The response begins at `position`. Raises IndexError: it is malformed, or has an unknown group, which protobuf can parse.
    """
    pieces: list[bytes] = []
    raw: list[memoryview] = []
    whole, last = memoryview(data), len(data)
    for tag, start, end in _fields(data, position, last):
        if end > last or tag & 7 == GROUP:
            raise IndexError(start)
        if tag == RESPONSE_RAW_TAG:
            raw.append(whole[start:end])
        else:
            pieces.append(data[position:end])
        position = end
    return b"".join(pieces), raw


def split_stream_response(data: bytes) -> tuple[bytes, list[memoryview]]:
    """Split the response in a ModelStreamInferResponse, as `split_response` does.

    Raises IndexError: it is malformed, or has fields besides the response.
    """
    length, start = _varint(data, 1)
    if data[0] != STREAM_INFER or start + length != len(data):
        raise IndexError(start)
    return split_response(data, start)


def put_request(head: bytes, raw: Sequence[bytes | memoryview]) -> bytes:
    """Join a request from a message without raw contents, and the raw contents."""
    parts: list[bytes | memoryview] = [head]
    for tensor in raw:
        parts += (length_delimited(REQUEST_RAW >> 3, len(tensor)), tensor)
    return join_unlocked(parts)


def put_id(request_id: bytes) -> bytes:
    """Return the response's id field; empty without an id."""
    return RESPONSE_ID + encoded_varint(len(request_id)) + request_id if request_id else b""


def raw_tag(size: int) -> bytes:
    """Return the tag and length that precede an output of `size` bytes."""
    return RESPONSE_RAW + encoded_varint(size)


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the varint at a position, and the position after it."""
    number = shift = 0
    while True:
        byte = data[position]
        number |= (byte & 0x7F) << shift
        position += 1
        if byte < 0x80:
            return number, position
        shift += 7
        if shift > 63:
            raise IndexError(position)


def parse(message: type[M], data: bytes) -> M:
    """Parse a message.

    Raises:
        InvalidArgumentError: the bytes are not such a message.
    """
    try:
        return message.FromString(data)
    except DecodeError:
        raise _malformed(message) from None


def _malformed(message: type[Message]) -> InvalidArgumentError:
    return InvalidArgumentError(f"the request is not a {message.DESCRIPTOR.name} message; check the client's .proto files")


def parse_request(data: bytes) -> ModelInferRequest:
    """Parse an inference request.

    Raises:
        InvalidArgumentError: it is malformed, or has too many fields.
    """
    check_fields(data)
    return parse(ModelInferRequest, data)


def check_fields(data: bytes) -> None:
    """Check that an inference request is small enough to be parsed.

    Raises:
        InvalidArgumentError: it has too many fields.
    """
    if has_too_many_fields(data):
        raise InvalidArgumentError(
            f"the request has more than {MAX_FIELDS} inputs, outputs, parameters and raw_input_contents, or its inputs and "
            f"outputs have more than {MAX_INNER_FIELDS} sizes and parameters; expected fewer"
        )


def inflate(data: bytes, coding: str, limit: int, *, what: str, advice: str) -> bytes:
    """Decompress `data` within bounds.

    Args:
        data: the complete compressed bytes.
        coding: one of WINDOW_BITS.
        limit: most bytes of the result; at most one more is decompressed.
        what: names the data in errors.
        advice: tells the client what to do if the data are too large.

    Raises:
        InvalidArgumentError: the data are malformed, truncated, or followed by other bytes.
        MessageTooLargeError: the result is over the limit.
    """
    view, bits = memoryview(data), WINDOW_BITS[coding]
    inflater, members = zlib.decompressobj(bits), 1
    pieces: list[bytes] = []
    size = at = 0
    while True:
        piece = view[at : at + PIECE_BYTES]
        try:
            inflated = inflater.decompress(piece, limit + 1 - size)
        except zlib.error:
            raise InvalidArgumentError(f"{what} does not decompress as {coding}; expected what its encoding says") from None
        pieces.append(inflated)
        size += len(inflated)
        at += len(piece) - len(inflater.unused_data)
        if size > limit:
            raise MessageTooLargeError(None, limit, advice)
        if not inflater.eof:
            if at == len(view):
                raise InvalidArgumentError(f"{what} ends inside its {coding} data; send all of it")
        elif at == len(view):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)
        elif coding != "gzip" or members == MAX_MEMBERS:
            raise InvalidArgumentError(f"{what} has {len(view) - at} bytes behind its {coding} data; expected none")
        else:
            inflater, members = zlib.decompressobj(bits), members + 1
