"""System shared memory: tensors that a client on the same machine leaves in /dev/shm instead of sending them.

Regions are read and written through their file, not mapped: a client that truncates a mapped file would kill the server with
SIGBUS, and a read from tmpfs costs no more than the copy into the batch would. Names and keys are never told to other clients.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from serve.engine.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError, UnsupportedError

FOLDER = "/dev/shm"  # noqa: S108  (where POSIX shared memory lives on Linux: shm_open(3))
# One name, as shm_open takes it: no folder, nothing hidden, nothing that leads out.
KEY = re.compile(r"/?[A-Za-z0-9_][A-Za-z0-9_.-]{0,253}")
OFF = "shared memory is off on this server; start it with --shared-memory, or send the bytes"


class OpenFile:
    """A file that is closed when nobody holds it any more.

    A worker thread may read from it while its region is unregistered: its number must not become another file's in that moment.
    """

    __slots__ = ("descriptor",)

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


@dataclass(frozen=True, kw_only=True)
class Region:
    """A part of a shared memory file that a client has registered.

    Attributes:
        name: that requests use.
        key: of the file.
        offset: of the region in the file, in bytes.
        byte_size: of the region.
        file: that holds it.
    """

    name: str
    key: str
    offset: int
    byte_size: int
    file: OpenFile


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one tensor lies.

    Attributes:
        region: by its name.
        offset: from the region's start, in bytes.
        byte_size: that is the tensor's, or that it may take.
    """

    region: str
    offset: int
    byte_size: int


class SharedMemory:
    """The regions of this server."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self._regions: dict[str, Region] = {}

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Open a region.

        Raises:
            UnsupportedError: shared memory is off here.
            InvalidArgumentError: the name or the key is none, there is no such file, or it is smaller than the region.
            AlreadyExistsError: the name is taken.
        """
        if not self.enabled:
            raise UnsupportedError(OFF)
        if not name:
            raise InvalidArgumentError("the region has no name; expected one that requests can use")
        if name in self._regions:
            raise AlreadyExistsError(f"shared memory region {name!r} is registered already; unregister it first")
        if not KEY.fullmatch(key) or not byte_size or offset + byte_size >= 2**63:
            raise InvalidArgumentError(
                f"region {name!r} has key {key!r}, offset {offset} and byte_size {byte_size}; expected the name of a shared "
                "memory object, and at least one byte of it"
            )
        file = OpenFile(_open(name, key))
        size = os.fstat(file.descriptor).st_size
        if offset + byte_size > size:
            raise InvalidArgumentError(
                f"region {name!r} ends at byte {offset + byte_size}, its shared memory object has {size}; register less"
            )
        self._regions[name] = Region(name=name, key=key, offset=offset, byte_size=byte_size, file=file)

    def unregister(self, name: str) -> None:
        """Close a region; "" closes all. One that is not registered is as good as closed."""
        if name:
            self._regions.pop(name, None)
        else:
            self._regions.clear()

    def regions(self, name: str) -> list[Region]:
        """The region of this name; "" lists all.

        Raises:
            NotFoundError: it is not registered.
        """
        return [self._find(name)] if name else list(self._regions.values())

    def read(self, place: Place) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """A copy of the bytes of a tensor.

        Raises:
            NotFoundError: the region is not registered.
            InvalidArgumentError: the tensor is not wholly inside of the region, or the client has shrunk its file.
        """
        self.check(place)
        data = np.empty(place.byte_size, np.uint8)
        self.read_into(place, data.data)
        return data

    def read_into(self, place: Place, target: memoryview) -> None:
        """Put the bytes of a tensor where they are wanted. Called on worker threads too.

        Raises:
            NotFoundError: the region is not registered.
            InvalidArgumentError: the tensor is not wholly inside of the region, or the client has shrunk its file.
        """
        region = self.check(place)
        if os.preadv(region.file.descriptor, [target], region.offset + place.offset) != place.byte_size:
            raise InvalidArgumentError(f"shared memory region {place.region!r} has become smaller than what is registered")

    def write(self, place: Place, data: bytes) -> None:
        """Put a tensor's bytes into its place.

        Raises:
            NotFoundError: the region is not registered any more.
            InvalidArgumentError: the bytes do not fit the place.
        """
        region = self.check(place)
        if len(data) > place.byte_size:
            raise InvalidArgumentError(
                f"an output of {len(data)} bytes does not fit its {place.byte_size} bytes of shared memory region "
                f"{place.region!r}; make them more"
            )
        os.pwrite(region.file.descriptor, data, region.offset + place.offset)

    def check(self, place: Place) -> Region:
        """The region that holds a place.

        Raises:
            UnsupportedError: shared memory is off here.
            NotFoundError: it is not registered.
            InvalidArgumentError: the place is not wholly inside of it.
        """
        if not self.enabled:
            raise UnsupportedError(OFF)
        region = self._find(place.region)
        if place.offset < 0 or place.byte_size < 0 or place.offset + place.byte_size > region.byte_size:
            raise InvalidArgumentError(
                f"bytes {place.offset} to {place.offset + place.byte_size} are not inside of shared memory region "
                f"{place.region!r}, which has {region.byte_size}"
            )
        return region

    def close(self) -> None:
        """Close all regions."""
        self.unregister("")

    def _find(self, name: str) -> Region:
        region = self._regions.get(name)
        if region is None:
            raise NotFoundError(f"shared memory region {name!r} is not registered; register it first")
        return region


def _open(name: str, key: str) -> int:
    with _as_invalid(name):
        return os.open(f"{FOLDER}/{key.lstrip('/')}", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)


@contextmanager
def _as_invalid(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidArgumentError(
            f"the shared memory object of region {name!r} cannot be opened: {error.strerror}; create it first"
        ) from None
