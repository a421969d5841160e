"""Files that are written completely or not at all: a reader, a crash or a full disk never sees a partial file."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

PERMISSIONS = 0o777


class PendingFile:
    """A file that is written beside `path` and gets that name when it is published.

    A symbolic link keeps pointing to its target, which is replaced. The new file gets the old one's permissions. Anything but a
    regular file, such as a pipe or /dev/null, cannot be replaced: it is written to directly. `file` is open for writing.

    Raises:
        OSError: The folder is missing or cannot be written to, or the disk is full. `filename` is `path`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary: Path | None = None
        with _named(path):
            if _is_special(path):
                self.file: BinaryIO = path.open("wb")
                return
            self._target = path.resolve()
            self._temporary = self._target.with_name(f".{self._target.name}.{secrets.token_hex(4)}.tmp")
            self.file = self._temporary.open("xb")

    def sync(self) -> None:
        """Wait until the bytes that were written are on the disk."""
        with _named(self._path):
            self.file.flush()
            if self._temporary is not None:
                os.fsync(self.file.fileno())

    def publish(self) -> None:
        """Close the file and put it in its place."""
        self.sync()
        with _named(self._path):
            self.file.close()
            if self._temporary is not None:
                if self._target.exists():
                    self._temporary.chmod(self._target.stat().st_mode & PERMISSIONS)
                self._temporary.replace(self._target)
                sync_folder(self._target.parent)

    def discard(self) -> None:
        """Close the file and remove it, unless it was published."""
        with suppress(OSError):
            self.file.close()
        if self._temporary is not None:
            with suppress(OSError):
                self._temporary.unlink(missing_ok=True)


@contextmanager
def atomic_file(path: Path | str) -> Iterator[BinaryIO]:
    """Open a file for writing that takes its place when the block ends without an error; see `PendingFile`.

    Raises:
        OSError: See `PendingFile`. What was at `path` stays as it was.
    """
    path = Path(path)
    pending = PendingFile(path)
    try:
        with _named(path):
            yield pending.file
        pending.publish()
    finally:
        pending.discard()


@contextmanager
def synced(path: Path) -> Iterator[BinaryIO]:
    """Open a new file whose bytes are on the disk when the block ends; FileExistsError where something is already there."""
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def write_and_sync(path: Path, content: bytes) -> None:
    """Write a new file and wait until its bytes are on the disk; see `synced`."""
    with synced(path) as file:
        file.write(content)


def sync_folder(folder: Path) -> None:
    """Wait until the folder's entries (names created, renamed, removed in it) are on the disk."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows has no handle for this; its renames are journalled
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checked_output(path: Path, option: str) -> Path:
    """Return the path if a file can be written there; call this before the work whose result the file will contain.

    Raises:
        OSError: It is a folder, or its folder is missing or not writeable; the text names the option.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{option} {path}: is a folder, expected the name of a file")
    if _is_special(path):
        if not os.access(path, os.W_OK):
            raise PermissionError(f"{option} {path}: is not writeable")
        return path
    folder = path.resolve().parent
    if not folder.is_dir():
        raise FileNotFoundError(f"{option} {path}: there is no folder {folder}; make it first")
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{option} {path}: the folder {folder} is not writeable")
    return path


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file()


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Make an OSError name the requested file instead of the temporary one or none."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
