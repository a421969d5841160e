"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

READABLE_BY_ALL = 0o644


@contextmanager
def written_whole(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for writing that takes its place under its name only when the block ends without an error.

    Raises:
        OSError: the folder is missing or cannot be written to; what stood under the name stays as it was.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(READABLE_BY_ALL)  # mkstemp's are readable by their owner only
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def checked_output(path: Path, option: str) -> Path:
    """The path as it is, if a file can be written there: asked before the work whose result it will hold.

    Raises:
        OSError: it is a folder, or its folder is missing or not writeable; the text names the option.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{option} {path}: is a folder, expected the name of a file")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{option} {path}: there is no folder {path.parent}; make it first")
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(f"{option} {path}: the folder {path.parent} is not writeable")
    return path
