"""gRPC's messages within a stream of bytes: each has a flag (compressed or not), its length, and then itself.

https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from serve.engine.errors import InvalidArgumentError, MessageTooLargeError, UnsupportedError

PREFIX_BYTES = 5  # flag, then the length in four bytes, big-endian
# zlib's window argument for each encoding: "deflate" is zlib's format in HTTP, not the bare one.
WINDOW_BITS = {b"gzip": 31, b"deflate": 15}
ACCEPTED_ENCODINGS = b"identity,deflate,gzip"


def frame(message: bytes) -> bytes:
    """An uncompressed message with its prefix."""
    return b"\0" + len(message).to_bytes(4, "big") + message


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
        self._pieces: list[bytes] = []
        self._held = 0  # bytes in _pieces
        self._wanted = PREFIX_BYTES  # bytes that _pieces must hold before anything can be done

    @property
    def held_bytes(self) -> int:
        """Bytes that wait for the rest of their message."""
        return self._held

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take the next bytes and give out the messages that they complete.

        Raises:
            MessageTooLargeError: a message is over the limit; raised as soon as its length is known.
            InvalidArgumentError: a flag or a compressed message is not what gRPC defines.
            UnsupportedError: the call's encoding is not known here.
        """
        self._pieces.append(data)
        self._held += len(data)
        while self._held >= self._wanted:
            joined = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
            flag, length = joined[0], int.from_bytes(joined[1:PREFIX_BYTES], "big")
            if length > self._limit:
                raise MessageTooLargeError(length, self._limit)
            end = PREFIX_BYTES + length
            if len(joined) < end:
                self._pieces, self._wanted = [joined], end
                return
            rest = joined[end:]
            self._pieces, self._held, self._wanted = ([rest] if rest else []), len(rest), PREFIX_BYTES
            message = joined[PREFIX_BYTES:end]
            yield self._decompressed(message) if flag else message

    def finish(self) -> None:
        """The client will send no more.

        Raises:
            InvalidArgumentError: in the middle of a message.
        """
        if self._held:
            raise InvalidArgumentError(f"the call ended inside a message: {self._held} bytes came, expected {self._wanted}")

    def _decompressed(self, message: bytes) -> bytes:
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
