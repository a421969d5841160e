"""gRPC over HTTP/2: length-prefixed messages, headers and trailers.

https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from struct import Struct
from typing import Final
from urllib.parse import quote, unquote_to_bytes

import numpy as np

from halfserve.serve.engine.errors import InvalidArgumentError, MessageTooLargeError, UnsupportedError
from halfserve.serve.protocol.messages import WINDOW_BITS, inflate
from halfserve.serve.protocol.status import Code, Status

PREFIX: Final = Struct(">BI")  # flag, then the length
PREFIX_BYTES: Final = 5
COMPRESSED: Final = 1
ACCEPTED_ENCODINGS: Final = b"identity,deflate,gzip"
LARGE_MESSAGE_BYTES: Final = 1 << 18  # copying such a message costs more than sending it in pieces
# Messages mostly end with a tensor: a buffer that ends at such an address aligns the tensor's elements.
ALIGNED_BYTES: Final = 16
Headers = list[tuple[bytes, bytes]]

RESPONSE: Final[Headers] = [(b":status", b"200"), (b"content-type", b"application/grpc")]
OK_TRAILERS: Final[Headers] = [(b"grpc-status", b"0")]

# An optional "+proto", and optional parameters.
CONTENT_TYPE = re.compile(rb"application/grpc(\+[\w.-]+)?[ \t]*(;.*)?", re.IGNORECASE)
TIMEOUT = re.compile(rb"(\d{1,8})([HMSmun])")
UNIT_SECONDS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
# Printable ASCII but for the percent sign: what grpc-message may hold as it is.
PLAIN = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
# Bytes on the wire. Clients refuse header lists over 8 KiB, and would lose the status of the call.
MAX_DETAILS: Final = 4096
CUT: Final = " ..."
FIELD_BYTES: Final = 32  # overhead that HTTP/2 counts per header field


def frame(message: bytes) -> bytes:
    return PREFIX.pack(0, len(message)) + message


def sole_message(data: bytes, max_message_bytes: int) -> bytes | None:
    """Return the message if `data` is exactly one uncompressed message of at most `max_message_bytes`, else None."""
    length = len(data) - PREFIX_BYTES
    if length < 0 or length > max_message_bytes or PREFIX.unpack_from(data) != (0, length):
        return None
    return data[PREFIX_BYTES:]


class MessageReader:
    """Reassembles the messages of one call from DATA frames."""

    def __init__(self, max_message_bytes: int, encoding: bytes | None = None, max_inflated_bytes: int | None = None) -> None:
        """`max_inflated_bytes` limits a compressed message, decompressed; None for `max_message_bytes`."""
        self._limit = max_message_bytes
        self._max_inflated = max_message_bytes if max_inflated_bytes is None else max_inflated_bytes
        self._encoding = encoding
        self._prefix = b""  # received part of the next message's prefix
        self._flag = 0
        self._missing: int | None = None  # bytes of the message; None while the prefix is incomplete
        self._pieces: list[bytes] = []
        self._held = 0  # bytes in _pieces

    @property
    def held_bytes(self) -> int:
        """Bytes of the incomplete message."""
        return len(self._prefix) if self._missing is None else PREFIX_BYTES + self._held

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take the next bytes and yield the messages that they complete.

        Raises:
            MessageTooLargeError: a message is over the limit; raised as soon as its length is known.
            InvalidArgumentError: a flag or a compressed message is not what gRPC defines.
            UnsupportedError: the call's encoding is not known here.
        """
        at = 0
        length: int
        while True:
            if self._missing is None:
                end = at + PREFIX_BYTES - len(self._prefix)
                self._prefix += data[at:end]
                if len(self._prefix) < PREFIX_BYTES:
                    return
                self._flag, length = PREFIX.unpack(self._prefix)
                if length > self._limit:
                    raise MessageTooLargeError(length, self._limit)
                self._prefix, self._missing, at = b"", length, end
            piece = data[at : at + self._missing]
            self._pieces.append(piece)
            self._held += len(piece)
            self._missing -= len(piece)
            if self._missing:
                return
            at += len(piece)
            message = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
            self._pieces, self._held, self._missing = [], 0, None
            yield self._decompressed(message) if self._flag else message

    def hold(self, data: bytes) -> bool:
        """Buffer `data` if it continues a message without completing it; False leaves it to `feed`."""
        missing = self._missing
        if missing is None or len(data) >= missing:
            return False
        self._pieces.append(data)
        self._held += len(data)
        self._missing = missing - len(data)
        return True

    def finish(self) -> None:
        """End the stream of messages.

        Raises:
            InvalidArgumentError: the stream ends within a message.
        """
        held = self.held_bytes
        if held:
            wanted = PREFIX_BYTES if self._missing is None else held + self._missing
            raise InvalidArgumentError(f"the call ended inside a message: {held} bytes came, expected {wanted}")

    def _decompressed(self, message: bytes) -> bytes:
        if self._flag != COMPRESSED:
            raise InvalidArgumentError(f"a message begins with the flag {self._flag}, expected 0 (plain) or 1 (compressed)")
        if self._encoding is None or self._encoding == b"identity":
            raise InvalidArgumentError("a message is marked as compressed, the call names no grpc-encoding; expected one")
        encoding = self._encoding.decode("ascii", "replace")
        if encoding not in WINDOW_BITS:
            raise UnsupportedError(
                f"grpc-encoding {encoding!r} is not known here; expected one of {ACCEPTED_ENCODINGS.decode()}"
            )
        limit, advice = self._limit, "split the request"
        if limit > self._max_inflated:
            limit, advice = self._max_inflated, "send it uncompressed"
        return inflate(message, encoding, limit, what="a message", advice=advice)


class PartialMessage:
    """A message that is assembled in its final buffer, so that each byte is copied once."""

    __slots__ = ("_message", "came")

    def __init__(self, length: int) -> None:
        """Allocate a buffer of `length` bytes."""
        before = -length % ALIGNED_BYTES
        self._message = np.empty(before + length, np.uint8).data[before:]
        self.came = PREFIX_BYTES  # bytes received, the prefix included

    @classmethod
    def starting_with(cls, piece: bytes | memoryview, max_bytes: int) -> PartialMessage | None:
        """Return the message that begins with `piece`; None unless it is uncompressed and at most `max_bytes` long."""
        if len(piece) < PREFIX_BYTES:
            return None
        flag, length = PREFIX.unpack_from(piece)
        if flag or length > max_bytes:
            return None
        growing = cls(length)
        return growing if growing.add(piece[PREFIX_BYTES:]) else None

    @property
    def length(self) -> int:
        """Length of the whole message."""
        return len(self._message)

    @property
    def missing(self) -> int:
        """Bytes that have not come."""
        return len(self._message) + PREFIX_BYTES - self.came

    @property
    def is_whole(self) -> bool:
        return not self.missing

    @property
    def message(self) -> memoryview:
        """The whole message, read-only."""
        return self._message.toreadonly()

    def add(self, piece: bytes | memoryview) -> bool:
        """Append bytes; False, without a change, if they exceed the message."""
        start, end = self.came - PREFIX_BYTES, self.came - PREFIX_BYTES + len(piece)
        if end > len(self._message):
            return False
        self._message[start:end] = piece
        self.came += len(piece)
        return True

    def add_run(self, data: bytes | memoryview, at: int, head: bytes, length: int, max_bytes: int) -> int:
        """Append what follows each `head` in `data`, from `at` on: pieces of `length` bytes, whole ones, up to `max_bytes`.

        Returns:
            The bytes appended.
        """
        message, before, start = self._message, len(head), self.came - PREFIX_BYTES
        place, last, size = start, start + max_bytes - length, len(data)
        while place <= last:
            body = at + before
            end = body + length
            if end > size or data[at:body] != head:
                break
            message[place : place + length] = data[body:end]
            place += length
            at = end
        self.came += place - start
        return place - start

    def so_far(self) -> bytes:
        """Return the received bytes, prefix included."""
        return PREFIX.pack(0, len(self._message)) + self._message[: self.came - PREFIX_BYTES]


def timeout_seconds(value: bytes | None) -> float | None:
    """Return the value of a `grpc-timeout` header in seconds.

    Raises:
        InvalidArgumentError: it is not a number of at most 8 digits and a unit.
    """
    if value is None:
        return None
    match = TIMEOUT.fullmatch(value)
    if match is None:
        raise InvalidArgumentError(
            f"grpc-timeout is {value.decode('ascii', 'replace')!r}, expected digits and a unit, as in 250m"
        )
    return int(match[1]) * UNIT_SECONDS[match[2]]


def refusal(headers: Mapping[bytes, bytes]) -> Headers | None:
    """Return the HTTP response to a request that is not a gRPC call; None for a gRPC call."""
    if headers.get(b":method") != b"POST":
        return [(b":status", b"405"), (b"allow", b"POST")]
    if CONTENT_TYPE.fullmatch(headers.get(b"content-type", b"")) is None:
        return [(b":status", b"415"), (b"accept", b"application/grpc")]
    return None


def oversize(headers: Iterable[tuple[bytes, bytes]], max_bytes: int) -> Headers | None:
    """Return the response to a call whose headers exceed `max_bytes`; None within the limit."""
    size = sum(len(name) + len(value) + FIELD_BYTES for name, value in headers)
    if size <= max_bytes:
        return None
    text = f"the call's headers take {size} bytes, expected at most {max_bytes}; send less metadata"
    return RESPONSE + trailers_of(Status(Code.RESOURCE_EXHAUSTED, text))


def cut_details(text: str) -> str:
    """Cut a status text to MAX_DETAILS bytes on the wire, after a whole character."""
    encoded = _encoded(text)
    if len(encoded) <= MAX_DETAILS:
        return text
    kept = encoded[: MAX_DETAILS - len(CUT)]
    start = kept.find("%", len(kept) - 2)  # an escape that was cut in two
    return unquote_to_bytes(kept if start < 0 else kept[:start]).decode(errors="ignore") + CUT


def trailers_of(status: Status) -> Headers:
    text = _encoded(cut_details(status.details))
    trailers = [(b"grpc-status", b"%d" % status.code), (b"grpc-message", text.encode("ascii"))]
    if status.code == Code.UNIMPLEMENTED:
        trailers.append((b"grpc-accept-encoding", ACCEPTED_ENCODINGS))
    return trailers + [(name.encode("ascii"), value.encode("ascii")) for name, value in status.trailers]


def _encoded(text: str) -> str:
    return quote(text, safe=PLAIN)
