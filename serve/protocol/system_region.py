"""A region of the system's shared memory: a part of a file in /dev/shm.

It is read and written through its file, not mapped: a client that truncates a mapped file would kill the server with SIGBUS,
and a read from tmpfs costs no more than the copy into the batch would.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass

from serve.engine.errors import InvalidArgumentError

FOLDER = "/dev/shm"  # noqa: S108  (where POSIX shared memory lives on Linux: shm_open(3))
MAX_NAME_BYTES = 255  # of a file


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
class SystemRegion:
    """A part of a shared memory file.

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

    def read_into(self, offset: int, target: memoryview) -> None:
        """Put bytes of the region where they are wanted.

        Raises:
            InvalidArgumentError: the client has shrunk its file.
        """
        at = 0
        while at < target.nbytes:  # the system takes up to 2 GiB in one go
            count = os.preadv(self.file.descriptor, [target[at:]], self.offset + offset + at)
            if not count:
                raise self._shrunk()
            at += count

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Put bytes into the region.

        Raises:
            InvalidArgumentError: the client has shrunk its file, or the system has no memory for the bytes: a file there may
                be longer than what is left.
        """
        view, at = memoryview(data), 0
        if self.offset + offset + len(view) > os.fstat(self.file.descriptor).st_size:  # a write would make it longer again
            raise self._shrunk()
        while at < len(view):  # where memory runs out, the system takes what still fits
            try:
                at += os.pwrite(self.file.descriptor, view[at:], self.offset + offset + at)
            except OSError as error:
                raise InvalidArgumentError(
                    f"an output of {len(view)} bytes cannot be written to shared memory region {self.name!r}: "
                    f"{error.strerror}; make room for shared memory, or have the output sent"
                ) from None

    def _shrunk(self) -> InvalidArgumentError:
        return InvalidArgumentError(f"shared memory region {self.name!r} has become smaller than what is registered")


def open_system_region(name: str, key: str, offset: int, byte_size: int) -> SystemRegion:
    """Open a region.

    Raises:
        InvalidArgumentError: the key is none, there is no such file, or it is smaller than the region.
    """
    file_name = key.removeprefix("/")
    if not _is_file_name(file_name) or not byte_size or offset + byte_size >= 2**63:
        raise InvalidArgumentError(
            f"region {name!r} has key {key!r}, offset {offset} and byte_size {byte_size}; expected the name of a shared "
            "memory object, and at least one byte of it"
        )
    try:
        file = OpenFile(os.open(f"{FOLDER}/{file_name}", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK))
    except OSError as error:
        raise InvalidArgumentError(
            f"the shared memory object of region {name!r} cannot be opened: {error.strerror}; create it first"
        ) from None
    status = os.fstat(file.descriptor)
    size = status.st_size
    if not stat.S_ISREG(status.st_mode):
        raise InvalidArgumentError(f"the key of region {name!r} is not that of a shared memory object; create one first")
    if offset + byte_size > size:
        raise InvalidArgumentError(
            f"region {name!r} ends at byte {offset + byte_size}, its shared memory object has {size}; register less"
        )
    return SystemRegion(name=name, key=key, offset=offset, byte_size=byte_size, file=file)


def _is_file_name(text: str) -> bool:
    """Whether it is one name, as shm_open(3) takes it: no folder, and nothing that leads out."""
    return text not in {"", ".", ".."} and not {"/", "\0"} & set(text) and len(os.fsencode(text)) <= MAX_NAME_BYTES
