"""gRPC's messages within a stream of bytes: each has a flag (compressed or not), its length, and then itself.

https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct

from serve.engine.errors import InvalidArgumentError, MessageTooLargeError, UnsupportedError
from serve.protocol.inflation import WINDOW_BITS, inflate

PREFIX = Struct(">BI")  # flag, then the length
PREFIX_BYTES = PREFIX.size
COMPRESSED = 1
ACCEPTED_ENCODINGS = b"identity,deflate,gzip"


def frame(message: bytes) -> bytes:
    """An uncompressed message with its prefix."""
    return PREFIX.pack(0, len(message)) + message


def sole_message(data: bytes, max_message_bytes: int) -> bytes | None:
    """The message, where these bytes are one, whole and not compressed, and no longer than that; None otherwise."""
    length = len(data) - PREFIX_BYTES
    if length < 0 or length > max_message_bytes or PREFIX.unpack_from(data) != (0, length):
        return None
    return data[PREFIX_BYTES:]


class MessageReader:
    """Puts the messages of one call together from the pieces in which they come."""

    def __init__(self, max_message_bytes: int, encoding: bytes | None = None, max_inflated_bytes: int | None = None) -> None:
        """A reader.

        Args:
            max_message_bytes: of one message, decompressed.
            encoding: the call's `grpc-encoding`.
            max_inflated_bytes: of one that comes compressed, decompressed; None for no less.
        """
        self._limit = max_message_bytes
        self._max_inflated = max_message_bytes if max_inflated_bytes is None else max_inflated_bytes
        self._encoding = encoding
        self._prefix = b""  # of the message that comes next, as far as it has come
        self._flag = 0
        self._missing: int | None = None  # bytes of the message; None while its prefix is not whole
        self._pieces: list[bytes] = []
        self._held = 0  # bytes in _pieces

    @property
    def held_bytes(self) -> int:
        """Bytes that wait for the rest of their message."""
        return len(self._prefix) if self._missing is None else PREFIX_BYTES + self._held

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take the next bytes and give out the messages that they complete.

        Raises:
            MessageTooLargeError: a message is over the limit; raised as soon as its length is known.
            InvalidArgumentError: a flag or a compressed message is not what gRPC defines.
            UnsupportedError: the call's encoding is not known here.
        """
        at = 0
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
            # The only copy of a large message that is made here.
            message = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
            self._pieces, self._held, self._missing = [], 0, None
            yield self._decompressed(message) if self._flag else message

    def hold(self, data: bytes) -> bool:
        """Take the next bytes if they are some more of a message and not yet its end; False leaves them to `feed`."""
        missing = self._missing
        if missing is None or len(data) >= missing:
            return False
        self._pieces.append(data)
        self._held += len(data)
        self._missing = missing - len(data)
        return True

    def finish(self) -> None:
        """The client will send no more.

        Raises:
            InvalidArgumentError: in the middle of a message.
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
