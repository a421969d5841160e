"""Writing so that a reader, a crash or a full disk never leaves half a file."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from export.errors import ExportError


def write_atomically(path: Path | str, content: bytes) -> None:
    """Put `content` at `path`: readers see the old file or the whole new one, and after a power cut too.

    A symbolic link goes on pointing to what it points to. What is there but no file, such as a pipe or /dev/null, cannot be
    replaced and is written to.

    Raises:
        ExportError: The folder is missing or cannot be written to, or the disk is full.
    """
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(content)
        else:
            _replace(path.resolve(), content)
    except OSError as error:
        raise ExportError(f"cannot write {path}: {error.strerror or error}") from error


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        write_and_sync(temporary, content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)  # where even this cannot be done, on a disk that is only read, it says the same
    sync_folder(path.parent)


def write_and_sync(path: Path, content: bytes) -> None:
    """Write a new file and wait until its bytes are on the disk; the file must not exist yet.

    Raises:
        OSError: As the system reports it (FileExistsError where something is already there).
    """
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the folder's entries (names created, renamed, removed in it) are on the disk.

    Raises:
        OSError: As the system reports it.
    """
    if not hasattr(os, "O_DIRECTORY"):  # Windows has no handle for this; its renames are journalled
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
