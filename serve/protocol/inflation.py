"""Inflate what clients send compressed, within bounds: a thousand bytes may stand for a million."""

from __future__ import annotations

import zlib

from serve.engine.errors import InvalidArgumentError, MessageTooLargeError

# zlib's window argument for each coding: "deflate" is zlib's format in HTTP and in gRPC, not the bare one.
WINDOW_BITS = {"gzip": 31, "deflate": 15}
PIECE_BYTES = 2**16  # inflated at a time: zlib copies what is left behind the end of a member
MAX_MEMBERS = 1024  # of gzip, which may follow each other: an empty one takes 20 bytes and some microseconds


def inflate(data: bytes, coding: str, limit: int, *, what: str, advice: str) -> bytes:
    """What was compressed.

    Args:
        data: all of it, as received.
        coding: one of WINDOW_BITS.
        limit: bytes that it may have; no more than one beyond these are ever inflated.
        what: in the text of an error.
        advice: to do where it is too large.

    Raises:
        InvalidArgumentError: it is not what the coding makes, it is not whole, or more follows it.
        MessageTooLargeError: it is over the limit.
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
