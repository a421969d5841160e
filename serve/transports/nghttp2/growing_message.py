"""A message that comes in pieces, put together where it stays: each byte is copied once."""

from __future__ import annotations

import numpy as np

from serve.transports.grpc_framing import PREFIX, PREFIX_BYTES

# A message's last bytes are mostly a tensor's, so that one which ends at such a place has its elements where arrays want them.
ALIGNED_BYTES = 16


class GrowingMessage:
    """One message, uncompressed and of known length.

    Attributes:
        came: bytes, those before the message included.
    """

    __slots__ = ("_message", "came")

    def __init__(self, length: int) -> None:
        """Nothing of it yet; it will have `length` bytes."""
        before = -length % ALIGNED_BYTES
        self._message = np.empty(before + length, np.uint8).data[before:]
        self.came = PREFIX_BYTES

    @classmethod
    def begun(cls, piece: bytes | memoryview, max_bytes: int) -> GrowingMessage | None:
        """The message that begins with `piece`; None where that is not the beginning of a plain one of up to so many bytes."""
        if len(piece) < PREFIX_BYTES:
            return None
        flag, length = PREFIX.unpack_from(piece)
        if flag or length > max_bytes:
            return None
        growing = cls(length)
        return growing if growing.add(piece[PREFIX_BYTES:]) else None

    @property
    def length(self) -> int:
        """Of all of it, for which there is memory from the beginning."""
        return len(self._message)

    @property
    def is_whole(self) -> bool:
        """Whether all of it has come."""
        return self.came - PREFIX_BYTES == len(self._message)

    @property
    def message(self) -> memoryview:
        """All of it, to be read only."""
        return self._message.toreadonly()

    def add(self, piece: bytes | memoryview) -> bool:
        """Take the next bytes; False, and nothing is taken, where they are more than it has."""
        start, end = self.came - PREFIX_BYTES, self.came - PREFIX_BYTES + len(piece)
        if end > len(self._message):
            return False
        self._message[start:end] = piece
        self.came += len(piece)
        return True

    def so_far(self) -> bytes:
        """What has come, as it came."""
        return PREFIX.pack(0, len(self._message)) + self._message[: self.came - PREFIX_BYTES]
