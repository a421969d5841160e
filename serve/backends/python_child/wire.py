"""Messages between the server and a model's process: a JSON header and tensors, over a Unix socket.

    header size (uint32) | payload size (uint32) | header | payload

Small tensors lie in the payload, larger ones in a shared memory segment. In the header, "t" lists the tensors as
[name, datatype, shape, offset, bytes]; "s" is the segment's number; "new" is there where its descriptor travels along; "drop"
names segments that may be unmapped.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from halfserve.serve.backends.python_child.shared_segments import AVAILABLE, MappedSegments, SegmentPool, aligned

PREFIX = struct.Struct("<II")
INLINE_BYTES = 1 << 16  # up to here copying through the socket is faster than a segment
CHUNK = INLINE_BYTES + (1 << 14)
MAX_BYTES = 1 << 31
MAX_FDS = 4
FD_SPACE = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)
Header = dict[str, Any]
ENCODE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False).encode
DECODE = json.JSONDecoder().raw_decode  # `decode` looks for spaces around the value, which takes half as long as decoding

# Datatypes on the wire. BYTES are length-prefixed, BF16 are uint16 bit patterns.
DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype("?"),
    "UINT8": np.dtype("<u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("<i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BF16": np.dtype("<u2"),
    "BYTES": np.dtype("u1"),
}


class WireTensor(NamedTuple):
    """One tensor of a message.

    Attributes:
        name: name of the input or output.
        datatype: the protocol's name, such as "FP32".
        shape: its sizes.
        data: the elements: an array of `DTYPES[datatype]`, flat or of `shape`; for BYTES the encoded bytes.
    """

    name: str
    datatype: str
    shape: Sequence[int]
    data: np.ndarray[Any, Any]


class ChannelClosedError(Exception):
    """The other process has gone, or has ended the connection."""


class Channel:
    """One end of a connection. Any thread may send; one thread at a time receives."""

    def __init__(self, connection: socket.socket, *, on_lone_surrogate: str = "surrogatepass") -> None:
        """`on_lone_surrogate`: what encodes half of a surrogate pair in what is sent, as `str.encode` takes it."""
        self._socket = connection
        self._on_lone_surrogate = on_lone_surrogate
        self._sending = threading.Lock()
        self._pool = SegmentPool()
        self._mapped = MappedSegments()
        self._rest = b""  # received, but not returned yet
        self._unsent = b""
        self._fds: deque[int] = deque()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_rest(self) -> bool:
        """Whether bytes have been received that `receive` has not returned yet."""
        return bool(self._rest)

    def shut_down(self) -> None:
        """End the connection for both sides, and wake a thread that receives."""
        with contextlib.suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()
        while self._fds:
            os.close(self._fds.popleft())

    def send(self, header: Header, tensors: Sequence[WireTensor] = (), *, waits: bool = True) -> bool:
        """Send one message; returns whether all of it was sent.

        `waits`: whether to wait until the other side has read enough. Otherwise `send_rest` sends what is left.

        Raises:
            ChannelClosedError: the other side has gone.
        """
        with self._sending:
            pool = self._pool
            pieces: list[Any] = []
            ancillary: list[tuple[int, int, bytes]] = []
            size = 0
            if tensors:
                size, segment = self._pack(header, tensors, pieces)
                if segment is not None and segment.fd >= 0:
                    header["new"] = 1
                    ancillary.append((socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [segment.fd]).tobytes()))
            else:
                segment = None
            if pool.dropped:
                header["drop"], pool.dropped = pool.dropped, []
            text = ENCODE(header).encode(errors=self._on_lone_surrogate)
            pieces.insert(0, PREFIX.pack(len(text), size) + text)
            try:
                sent = self._socket.sendmsg(pieces, ancillary, 0 if waits else socket.MSG_DONTWAIT)
            except OSError:
                raise ChannelClosedError from None
            finally:
                if segment is not None:
                    segment.close_file()
            if sent < PREFIX.size + len(text) + size:
                self._unsent = b"".join(pieces)[sent:]
                if waits:
                    self.send_rest()
            return not self._unsent

    def send_rest(self) -> None:
        """Send what is left of a message.

        Raises:
            ChannelClosedError: the other side has gone.
        """
        rest, self._unsent = self._unsent, b""
        try:
            self._socket.sendall(rest)
        except OSError:
            raise ChannelClosedError from None

    def _pack(self, header: Header, tensors: Sequence[WireTensor], pieces: list[Any]) -> tuple[int, Any]:
        """Describe the tensors in the header, and lay them into `pieces` or a segment: bytes in pieces, and the segment."""
        entries, offset, end = [], 0, 0
        for name, datatype, shape, data in tensors:
            if offset > end:
                pieces.append(bytes(offset - end))
            size = data.nbytes
            pieces.append(data if data.flags.c_contiguous else np.ascontiguousarray(data))
            entries.append((name, datatype, shape, offset, size))
            end = offset + size
            offset = aligned(end)
        header["t"] = entries
        if end <= INLINE_BYTES or not AVAILABLE:
            return end, None
        try:
            segment = self._pool.take(end)
        except OSError:  # there is no memory or no descriptor for it
            segment = None
        if segment is None:  # or the other side has not returned enough yet
            return end, None
        header["s"] = segment.number
        target, arrays = np.frombuffer(segment.view, np.uint8), (piece for piece in pieces if isinstance(piece, np.ndarray))
        for (_, _, _, start, size), data in zip(entries, arrays, strict=True):
            target[start : start + size] = data.reshape(-1).view(np.uint8)
        pieces.clear()
        return 0, segment

    def take_in(self) -> bool | None:
        """Receive what has come, without waiting.

        Returns:
            Whether `receive` returns at once. False where it raises, or has to wait for the rest of a large message; None where
            the message has not come yet.
        """
        while True:
            data, missing = self._rest, PREFIX.size - len(self._rest)
            if missing <= 0:
                head, size = PREFIX.unpack_from(data)
                missing += head + size
                if missing <= 0:
                    return True
                if missing > CHUNK:
                    return False
            try:
                data = self._receive(CHUNK, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            except OSError:
                return False
            if not data:
                return False
            self._rest += data

    def receive(self) -> tuple[Header, list[WireTensor]]:
        """Return the next message: its header as it was given to `send`, and its tensors.

        They are writable views of shared memory, or arrays of their own.

        Raises:
            ChannelClosedError: the other side has gone.
            ValueError: the message is malformed.
        """
        data = self._rest or self._more(b"", PREFIX.size)
        if len(data) < PREFIX.size:
            data = self._more(data, PREFIX.size)
        head, size = PREFIX.unpack_from(data)
        start, whole = PREFIX.size + head, PREFIX.size + head + size
        if whole > MAX_BYTES:
            raise ValueError(f"a message of {whole} bytes is too large")
        if len(data) < whole:
            data = self._more(data, whole)
        self._rest = data[whole:]
        text = data[PREFIX.size : start].decode(errors="surrogatepass")
        header, end = DECODE(text)
        if end != len(text):
            raise ValueError(f"a header of {len(text)} characters ends after {end}")
        tensors = self._tensors(header, bytearray(data[start:whole])) if "t" in header else []
        for number in header.pop("drop", ()):
            self._mapped.drop(number)
        return header, tensors

    def _more(self, have: bytes, size: int) -> bytes:
        """Receive until there are `size` bytes or more; `have` was received before, and comes first."""
        parts, count = [have], len(have)
        while count < size:
            try:
                data = self._receive(max(CHUNK, min(size - count, 1 << 24)))
            except OSError:
                raise ChannelClosedError from None
            if not data:
                raise ChannelClosedError
            parts.append(data)
            count += len(data)
        self._rest = b"".join(parts) if have else (parts[1] if len(parts) == 2 else b"".join(parts))
        return self._rest

    def _receive(self, size: int, flags: int = 0) -> bytes:
        """Receive up to `size` bytes, and the descriptors that come with them."""
        data, ancillary, _, _ = self._socket.recvmsg(size, FD_SPACE, flags)
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
                self._fds.extend(numbers)
        return data

    def _tensors(self, header: Header, payload: bytearray) -> list[WireTensor]:
        if "s" in header:
            is_new = header.pop("new", 0)
            if is_new and not self._fds:
                raise ValueError("a shared memory file has not arrived: this process may open no more files (ulimit -n)")
            fd = self._fds.popleft() if is_new else None
            source: Any = self._mapped.view(header.pop("s"), fd)
        else:
            source = payload
        tensors = []
        for name, datatype, shape, offset, size in header.pop("t"):
            dtype = DTYPES[datatype]
            piece = np.frombuffer(source, dtype, size // dtype.itemsize, offset) if size else np.empty(0, dtype)
            if datatype != "BYTES" and len(shape) != 1:
                piece = piece.reshape(shape)
            tensors.append(WireTensor(name, datatype, shape, piece))
        return tensors
