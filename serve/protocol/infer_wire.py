"""ModelInferRequest and ModelInferResponse as bytes, cut and put together by hand where it is worth it.

Requests of one client differ in their id and their tensors' bytes only. Cutting those two out of the message leaves the
request's *form*, which needs to be parsed and checked once. Each field is a tag, and for those with a length, the length as a
varint and as many bytes: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from protos.varint import encoded_varint

NUMBER, EIGHT_BYTES, WITH_LENGTH, GROUP, GROUP_END, FOUR_BYTES = range(6)
FIXED_BYTES = {EIGHT_BYTES: 8, FOUR_BYTES: 4, GROUP: 0, GROUP_END: 0}
# Of one message. Two bytes can be an input, which takes microseconds and, once parsed, a hundred bytes: a message of megabytes
# would keep everybody waiting. A request with ten thousand inputs and as many outputs has fewer.
MAX_FIELDS = 2**15
# Of its inputs and outputs together, each size of a shape counted: a parameter takes half a microsecond and 150 bytes.
MAX_INNER_FIELDS = 2**16
REQUEST_TENSORS = {5 << 3 | WITH_LENGTH, 6 << 3 | WITH_LENGTH}
TENSOR_SHAPE = 3 << 3 | WITH_LENGTH
REQUEST_ID = 3 << 3 | WITH_LENGTH
REQUEST_RAW = 7 << 3 | WITH_LENGTH
RESPONSE_ID = b"\x1a"
RESPONSE_RAW = b"\x32"


@dataclass(frozen=True, slots=True)
class CutRequest:
    """A request in pieces.

    Attributes:
        form: all of the message but its id and its raw contents.
        id: the request's id, ASCII.
        id_offset: where it lies in the message; 0 where there is none.
        raw: where each entry of raw_input_contents lies in the message: (offset, bytes).
    """

    form: bytes
    id: bytes
    id_offset: int
    raw: list[tuple[int, int]]


def cut_request(data: bytes) -> CutRequest | None:
    """Cut a request into form, id and raw contents; None where it is not as plain as that, or no message at all."""
    pieces: list[bytes] = []
    raw: list[tuple[int, int]] = []
    request_id = b""
    position = start = id_offset = 0
    end = len(data)
    try:
        while position < end:
            tag, length, body = data[position], data[position + 1], position + 2
            if length > 0x7F:
                length, body = _varint(data, position + 1)
            # A field without a length, or with a number over 15; or a second id, of which protobuf looks at both.
            if tag & 0x87 != WITH_LENGTH or (tag == REQUEST_ID and id_offset):
                return None
            after = body + length
            if tag in (REQUEST_RAW, REQUEST_ID):
                if start != position:
                    pieces.append(data[start:position])
                start = after
                if tag == REQUEST_RAW:
                    raw.append((body, length))
                else:
                    request_id, id_offset = data[body:after], body
            position = after
    except IndexError:
        return None
    if position != end or not request_id.isascii():
        return None
    if start != end:
        pieces.append(data[start:])
    return CutRequest(pieces[0] if len(pieces) == 1 else b"".join(pieces), request_id, id_offset, raw)


def has_too_many_fields(data: bytes) -> bool:
    """Whether a message has more than MAX_FIELDS, or its inputs and outputs more than MAX_INNER_FIELDS; False where it is none.

    Those within these, such as the elements of typed contents, are not counted.
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
    """The fields of an input or an output, no further than to the first beyond the most."""
    count = 0
    for tag, body, after in _fields(data, start, end):
        count += 1 + (after - body if tag == TENSOR_SHAPE else 0)
        if count > most:
            break
    return count


def _fields(data: bytes, position: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Each field between two places: its tag, and from where to where its content is.

    Raises:
        IndexError: this is no message.
    """
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


def put_response(head: bytes, request_id: bytes, outputs: bytes, raw: list[bytes]) -> bytes:
    """A response from its serialized parts.

    Args:
        head: a message with the model's name and version.
        request_id: of the request, ASCII.
        outputs: a message with the entries of the outputs.
        raw: the bytes of each output.
    """
    parts = [head, put_id(request_id), outputs]
    for tensor in raw:
        parts += (raw_tag(len(tensor)), tensor)
    return b"".join(parts)


def put_id(request_id: bytes) -> bytes:
    """The response's field of the request's id; nothing where it has none."""
    return RESPONSE_ID + encoded_varint(len(request_id)) + request_id if request_id else b""


def raw_tag(size: int) -> bytes:
    """What stands before the bytes of an output."""
    return RESPONSE_RAW + encoded_varint(size)


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """The number at a place and the place after it."""
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
