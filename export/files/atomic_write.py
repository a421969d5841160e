"""Writing so that a reader, a crash or a full disk never leaves half a file."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from export.errors import ExportError


def write_atomically(path: Path | str, content: bytes) -> None:
    """Put `content` at `path`: readers see the old file or the whole new one, and after a power cut too.

    A symbolic link goes on pointing to what it points to. What is there but no file, such as a pipe or /dev/null, cannot be
    replaced and is written to.

    Raises:
        ExportError: The folder is missing or cannot be written to, or the disk is full.
    """
    with waiting_file(path, content) as put:
        put()


@contextmanager
def waiting_file(path: Path | str, content: bytes) -> Iterator[Callable[[], None]]:
    """Write `content` beside `path` now, all that may fail but a rename; what comes out puts it there, as `write_atomically`.

    On leaving, what was not put there is removed. What is there but no file is written to at once.

    Raises:
        ExportError: See `write_atomically`.
    """
    path = Path(path)
    place, waits, temporary = path, False, path
    try:
        with _named(path):
            waits = path.is_file() or not path.exists()
            if waits:
                place = path.resolve()
                temporary = place.with_name(f".{place.name}.{os.getpid()}-{threading.get_ident()}.tmp")
                write_and_sync(temporary, content)
            else:
                path.write_bytes(content)

        def put() -> None:
            with _named(path):
                if waits:
                    temporary.replace(place)
                    sync_folder(place.parent)

        yield put
    finally:
        if waits:
            with _named(path):
                temporary.unlink(missing_ok=True)  # on a disk that is only read it says the same


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ExportError(f"cannot write {path}: {error.strerror or error}") from error


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
