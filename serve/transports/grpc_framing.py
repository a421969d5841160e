"""gRPC's messages within a stream of bytes: each has a flag (compressed or not), its length, and then itself.

https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from struct import Struct

from serve.engine.errors import InvalidArgumentError, MessageTooLargeError, UnsupportedError

PREFIX = Struct(">BI")  # flag, then the length
PREFIX_BYTES = PREFIX.size
COMPRESSED = 1
# zlib's window argument for each encoding: "deflate" is zlib's format in HTTP, not the bare one.
WINDOW_BITS = {b"gzip": 31, b"deflate": 15}
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

    def __init__(self, max_message_bytes: int, encoding: bytes | None = None) -> None:
        """A reader.

        Args:
            max_message_bytes: of one message, decompressed.
            encoding: the call's `grpc-encoding`.
        """
        self._limit = max_message_bytes
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
        bits = WINDOW_BITS.get(self._encoding)
        if bits is None:
            raise UnsupportedError(
                f"grpc-encoding {self._encoding.decode('ascii', 'replace')!r} is not known here; "
                f"expected one of {ACCEPTED_ENCODINGS.decode()}"
            )
        inflater = zlib.decompressobj(bits)
        try:
            # One byte more than allowed: what would fill it is too large, and is not inflated any further.
            inflated = inflater.decompress(message, self._limit + 1)
        except zlib.error:
            raise InvalidArgumentError(f"a message does not decompress as {self._encoding.decode()}") from None
        if len(inflated) > self._limit:
            raise MessageTooLargeError(len(inflated), self._limit)
        if not inflater.eof:
            raise InvalidArgumentError(f"a message ends inside its {self._encoding.decode()} data")
        return inflated
