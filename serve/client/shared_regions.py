"""Shared memory region for arrays that are not sent to a server on the same machine."""

from __future__ import annotations

import math
import mmap
import operator
import os
import secrets
import threading
import weakref
from collections.abc import Iterable, Sequence

import numpy as np

from halfserve.serve.client.array_conversion import Array
from halfserve.serve.client.errors import ClientError, InvalidRequest
from halfserve.serve.client.infer_messages import SharedSlice

FOLDER = "/dev/shm"  # noqa: S108  (where POSIX shared memory lives on Linux: shm_open(3))
ALIGNMENT = 64  # bytes; the width of a vector register
ONLY_OWNER = 0o600


class SharedRegion:
    """Memory of this client that a server can read and write.

    Made by `Client.shared_region`. Its arrays stay usable after it is closed; the memory is freed with the last
    of them. The server must run as the same user, or as root.

    Attributes:
        name: name under which the server registers it.
        key: name of the shared memory object, as in shm_open(3).
        byte_size: size of the region: a page or two more than requested, so that arrays of that many bytes fit although each
            begins at a multiple of 64.

    Raises:
        InvalidRequest: the size is not a whole number of 1 or more.
        ClientError: this system has no shared memory, or too little (code "RESOURCE_EXHAUSTED").
    """

    def __init__(self, byte_size: int) -> None:
        if not isinstance(byte_size, int | np.integer) or byte_size < 1:
            raise InvalidRequest(f"a shared memory region needs a whole number of bytes, 1 or more, not {byte_size!r}")
        self.byte_size = (-(-int(byte_size) // mmap.PAGESIZE) + 1) * mmap.PAGESIZE
        self.name = f"halfserve-{os.getpid()}-{secrets.token_hex(8)}"
        self.key = f"/{self.name}"
        path = f"{FOLDER}{self.key}"
        self._memory = np.frombuffer(_map_new(path, self.byte_size), np.uint8)
        self._address = _address_of(self._memory)
        self._used = 0
        self._lock = threading.Lock()
        # Runs at the end of the process at the latest, but not in a forked child, whose parent still uses the memory.
        self._unlink = weakref.finalize(self, _unlink, path, os.getpid())

    def array(self, shape: int | Sequence[int], dtype: np.typing.DTypeLike) -> Array:
        """Allocate an array in the region; memory not used before is zero.

        Args:
            shape: shape of the array.
            dtype: dtype of its elements, of fixed size, such as np.float16 or ml_dtypes.bfloat16.

        Raises:
            InvalidRequest: there is no space left for it, the shape is invalid, or the dtype has no fixed size.
        """
        sizes, element = _sizes_of(shape), np.dtype(dtype)
        if element.hasobject or not element.itemsize:
            raise InvalidRequest(f"shared memory holds numbers, not {element}; send BYTES in the message")
        needed = math.prod(sizes) * element.itemsize
        with self._lock:
            start = -(-self._used // ALIGNMENT) * ALIGNMENT
            if start + needed > self.byte_size:
                raise InvalidRequest(
                    f"an array of {needed} bytes does not fit the region of {self.byte_size} bytes ({start} are taken); "
                    "make the region larger, or clear() it"
                )
            self._used = start + needed
        return self._memory[start : start + needed].view(element).reshape(sizes)

    def clear(self) -> None:
        """Free the whole region: the next arrays are placed at the start again, over the existing ones."""
        with self._lock:
            self._used = 0

    def place_of(self, array: Array) -> SharedSlice | None:
        """Location of an array in the region; None for an array outside of it, or one that is not C-contiguous."""
        offset = _address_of(array) - self._address
        if not 0 <= offset <= self.byte_size - array.nbytes or not array.flags.c_contiguous or not array.nbytes:
            return None
        return SharedSlice(region=self.name, offset=offset, byte_size=array.nbytes)

    def bytes_at(self, offset: int, byte_size: int) -> memoryview:
        """View bytes of the region."""
        return self._memory.data[offset : offset + byte_size]

    def unlink(self) -> None:
        """Remove the name of the shared memory object; further calls do nothing."""
        self._unlink()


def _sizes_of(shape: int | Sequence[int]) -> tuple[int, ...]:
    """Check and normalize the shape; a negative size would mean the rest of the region, where other arrays are."""
    try:
        sizes = tuple(map(operator.index, shape if isinstance(shape, Iterable) else (shape,)))
    except TypeError:
        sizes = (-1,)
    if min(sizes, default=0) < 0:
        raise InvalidRequest(f"an array has sizes of 0 or more, whole numbers all, not {shape!r}")
    return sizes


def _map_new(path: str, byte_size: int) -> mmap.mmap:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, ONLY_OWNER)
    except OSError as error:
        raise ClientError(
            f"cannot make shared memory in {FOLDER}: {error.strerror}; send the tensors in the message", code="UNIMPLEMENTED"
        ) from None
    try:
        # Allocate the pages now: later, a full /dev/shm would kill this process with SIGBUS at the first write.
        os.posix_fallocate(descriptor, 0, byte_size)
        return mmap.mmap(descriptor, byte_size)
    except BaseException as error:  # Ctrl-C too: allocating many pages takes long
        os.unlink(path)  # noqa: PTH108  (PTH would have a Path made for it)
        if not isinstance(error, OSError | OverflowError):
            raise
        reason = error.strerror if isinstance(error, OSError) else "more than there are addresses"
        raise ClientError(
            f"{FOLDER} has no room for {byte_size} bytes: {reason}; send the tensors in the message", code="RESOURCE_EXHAUSTED"
        ) from None
    finally:
        os.close(descriptor)


def _address_of(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _unlink(path: str, process: int) -> None:
    if os.getpid() == process:
        try:
            os.unlink(path)  # noqa: PTH108  (pathlib may be gone when the interpreter ends)
        except FileNotFoundError:
            return
