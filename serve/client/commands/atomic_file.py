"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

PERMISSIONS = 0o777


@contextmanager
def written_whole(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for writing that takes its place under its name only when the block ends without an error.

    A file that is replaced hands its permissions down, and a symbolic link goes on pointing to what it points to. What is there
    but no file, such as a pipe or /dev/null, cannot be replaced and is written to as the block goes.

    Raises:
        OSError: the folder is missing or cannot be written to; what stood under the name stays as it was. It names the file.
    """
    if _is_special(path):
        with path.open("wb") as file:
            yield file
        return
    target = path.resolve()
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            temporary.chmod(target.stat().st_mode & PERMISSIONS)
        temporary.replace(target)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None:  # which names nothing, or a file that is not there any more
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def checked_output(path: Path, option: str) -> Path:
    """The path as it is, if a file can be written there: asked before the work whose result it will hold.

    Raises:
        OSError: it is a folder, or its folder is missing or not writeable; the text names the option.
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
