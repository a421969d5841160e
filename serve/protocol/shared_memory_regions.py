"""Memory regions that a client registers: a part of a file in /dev/shm, or memory on a CUDA device.

Files are read and written, not mapped, unless the operator trusts the clients: a client that truncates a mapped file kills the
server with SIGBUS. Device memory is copied through the host, where batches are assembled.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from halfserve.protos.triton_errors import TritonPhrase
from halfserve.serve.engine.cuda_driver import HANDLE_BYTES, CudaError, SharedDeviceMemory, cuda_driver
from halfserve.serve.engine.errors import InferenceError, InvalidArgumentError, UnavailableError, UnsupportedError

FOLDER = "/dev/shm"  # noqa: S108  (where POSIX shared memory lives on Linux: shm_open(3))
MAX_NAME_BYTES = 255  # most bytes of a file's name


class SharedMemoryMode(StrEnum):
    """Access to system regions.

    Attributes:
        SAFE: the server reads and writes the file, so that no client can end the server.
        TRUSTED: the server maps the file and computes on the mapping. A client that truncates the file ends the server with
            SIGBUS, and so does an output for which tmpfs has no memory left.
    """

    SAFE = "safe"
    TRUSTED = "trusted"


class _ShrunkError(Exception):
    """The file has become smaller than the region."""


class SharedFile:
    """A region of a file that is read and written. The descriptor is closed once unreferenced.

    A thread may still read while the region is unregistered: the descriptor's number must not be reused meanwhile.
    """

    __slots__ = ("descriptor", "start")

    mapping: None = None

    def __init__(self, descriptor: int, start: int) -> None:
        """`start`: the region's offset in the file, in bytes."""
        self.descriptor = descriptor
        self.start = start

    def __del__(self) -> None:
        os.close(self.descriptor)

    def read_into(self, offset: int, target: memoryview) -> None:
        """Copy bytes from the region's `offset` to `target`."""
        at = 0
        while at < target.nbytes:  # the loop is needed because preadv reads at most 2 GiB
            count = os.preadv(self.descriptor, [target[at:]], self.start + offset + at)
            if not count:
                raise _ShrunkError
            at += count

    def write(self, offset: int, view: memoryview) -> None:
        """Copy bytes to the region's `offset`.

        Raises:
            OSError: tmpfs has no memory left.
        """
        start, at = self.start + offset, 0
        if start + len(view) > os.fstat(self.descriptor).st_size:  # a write would extend it
            raise _ShrunkError
        while at < len(view):  # writes are short when memory runs out
            at += os.pwrite(self.descriptor, view[at:], start + at)


class MappedFile:
    """A region of a file that is mapped. The mapping lasts as long as its views, such as the inputs of a running batch.

    Attributes:
        mapping: all bytes of the region, writable.
    """

    __slots__ = ("mapping",)

    def __init__(self, descriptor: int, start: int, byte_size: int) -> None:
        """Map `byte_size` bytes from the file's offset `start`. The descriptor is not used afterwards.

        Raises:
            OSError: the system refuses the mapping.
        """
        before = start % mmap.ALLOCATIONGRANULARITY
        whole = mmap.mmap(descriptor, before + byte_size, offset=start - before)
        self.mapping = memoryview(whole)[before:]

    def read_into(self, offset: int, target: memoryview) -> None:
        """Copy bytes from the region's `offset` to `target`."""
        target[:] = self.mapping[offset : offset + len(target)]

    def write(self, offset: int, view: memoryview) -> None:
        """Copy bytes to the region's `offset`."""
        self.mapping[offset : offset + len(view)] = view


@dataclass(frozen=True, kw_only=True)
class SystemRegion:
    """A part of a shared memory file."""

    name: str  # the name that requests use
    key: str  # name of the shared memory object
    offset: int  # start of the region in the file, in bytes
    byte_size: int  # size of the region
    content: SharedFile | MappedFile  # the region's bytes

    @property
    def mapping(self) -> memoryview | None:
        """All bytes of the region, writable; None in the safe mode."""
        return self.content.mapping

    def read_into(self, offset: int, target: memoryview) -> None:
        """Copy bytes of the region to `target`.

        Raises:
            InvalidArgumentError: the client has shrunk the file.
        """
        try:
            self.content.read_into(offset, target)
        except _ShrunkError:
            raise self._shrunk() from None

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Copy bytes into the region.

        Raises:
            InvalidArgumentError: the client has shrunk the file, or tmpfs has no memory left for it.
        """
        try:
            self.content.write(offset, memoryview(data))
        except _ShrunkError:
            raise self._shrunk() from None
        except OSError as error:
            raise InvalidArgumentError(
                f"an output of {len(data)} bytes cannot be written to shared memory region {self.name!r}: "
                f"{error.strerror}; make room for shared memory, or have the output sent"
            ) from None

    def _shrunk(self) -> InvalidArgumentError:
        return InvalidArgumentError(f"shared memory region {self.name!r} has become smaller than what is registered")


def open_system_region(name: str, key: str, offset: int, byte_size: int, mode: SharedMemoryMode) -> SystemRegion:
    """Open a region of system shared memory.

    Raises:
        InvalidArgumentError: the key is invalid, or the file is missing or smaller than the region.
    """
    file_name = key.removeprefix("/")
    if not _is_file_name(file_name) or not byte_size or offset + byte_size >= 2**63:
        raise InvalidArgumentError(
            f"region {name!r} has key {key!r}, offset {offset} and byte_size {byte_size}; expected the name of a shared "
            "memory object, and at least one byte of it"
        ).like(TritonPhrase.REGION_INVALID if file_name else TritonPhrase.REGION_NOT_OPENED, region=name, key=key)
    try:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        file = SharedFile(os.open(f"{FOLDER}/{file_name}", flags), offset)
    except OSError as error:
        raise InvalidArgumentError(
            f"the shared memory object of region {name!r} cannot be opened: {error.strerror}; create it first"
        ).like(TritonPhrase.REGION_NOT_OPENED, key=key) from None
    status = os.fstat(file.descriptor)
    size = status.st_size
    if not stat.S_ISREG(status.st_mode):
        raise InvalidArgumentError(f"the key of region {name!r} is not that of a shared memory object; create one first")
    if offset + byte_size > size:
        raise InvalidArgumentError(
            f"region {name!r} ends at byte {offset + byte_size}, its shared memory object has {size}; register less"
        ).like(TritonPhrase.REGION_INVALID, region=name)
    try:
        content = file if mode is SharedMemoryMode.SAFE else MappedFile(file.descriptor, offset, byte_size)
    except OSError as error:
        raise InvalidArgumentError(
            f"region {name!r} of {byte_size} bytes cannot be mapped: {error.strerror}; register less"
        ) from None
    return SystemRegion(name=name, key=key, offset=offset, byte_size=byte_size, content=content)


def _is_file_name(text: str) -> bool:
    """Return whether a key is a single file name, as in shm_open(3)."""
    return text not in {"", ".", ".."} and not {"/", "\0"} & set(text) and len(os.fsencode(text)) <= MAX_NAME_BYTES


@dataclass(frozen=True, kw_only=True)
class CudaRegion:
    """Device memory that a client has exported."""

    name: str  # the name that requests use
    device_id: int  # number of the CUDA device
    byte_size: int  # size of the region
    memory: SharedDeviceMemory  # the opened device memory
    on_lost_device: Callable[[str], None]  # called, on any thread, with the error of a lost device
    mapping: None = None  # the host cannot address the memory

    def read_into(self, offset: int, target: memoryview) -> None:
        """Copy bytes of the region to `target`.

        Raises:
            InvalidArgumentError: the driver cannot read them.
            UnavailableError: the device is lost.
        """
        try:
            self.memory.read_into(offset, target)
        except CudaError as error:
            raise self._failure(error) from None

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Copy bytes into the region.

        Raises:
            InvalidArgumentError: the driver cannot write them.
            UnavailableError: the device is lost.
        """
        try:
            self.memory.write(offset, bytes(data))
        except CudaError as error:
            raise self._failure(error) from None

    def _failure(self, error: CudaError) -> InferenceError:
        driver = cuda_driver()
        if driver is not None and driver.is_lost(self.device_id):
            # The request alone fails, because its model may compute on another device, which is well.
            self.on_lost_device(str(error))
            return UnavailableError(
                f"CUDA device {self.device_id}, which holds shared memory region {self.name!r}, was lost to the server; send "
                "the bytes, or register memory of another device"
            )
        return InvalidArgumentError(
            f"CUDA shared memory region {self.name!r} cannot be reached: {error}; keep the memory until it is unregistered"
        )


def has_cuda() -> bool:
    driver = cuda_driver()
    return driver is not None and driver.device_count > 0


def open_cuda_region(
    name: str, raw_handle: bytes, device_id: int, byte_size: int, on_lost_device: Callable[[str], None]
) -> CudaRegion:
    """Open a region on a CUDA device; `on_lost_device`: see `CudaRegion`.

    Raises:
        UnsupportedError: there is no CUDA device.
        InvalidArgumentError: the handle is invalid, or the memory cannot be opened or is smaller than the region.
    """
    driver = cuda_driver()
    if driver is None or not (devices := driver.device_count):
        raise UnsupportedError("this server has no CUDA device; use system shared memory, or send the bytes")
    if len(raw_handle) != HANDLE_BYTES or not byte_size or not 0 <= device_id < devices:
        raise InvalidArgumentError(
            f"region {name!r} has a raw_handle of {len(raw_handle)} bytes, device_id {device_id} and byte_size {byte_size}; "
            f"expected the {HANDLE_BYTES} bytes of a cudaIpcMemHandle_t, one of {devices} devices, and at least one byte"
        ).like(TritonPhrase.REGION_INVALID, region=name)
    try:
        memory = driver.open_shared(raw_handle, device_id)
    except CudaError as error:
        raise InvalidArgumentError(
            f"the CUDA memory of region {name!r} cannot be opened on device {device_id}: {error}; expected the handle of "
            "memory that another process on this machine holds"
        ) from None
    size = memory.byte_size
    if size is not None and byte_size > size:
        raise InvalidArgumentError(f"region {name!r} has {byte_size} bytes, its CUDA memory {size}; register less")
    return CudaRegion(name=name, device_id=device_id, byte_size=byte_size, memory=memory, on_lost_device=on_lost_device)
