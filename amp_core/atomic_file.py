"""Files that are either the old ones or the new ones, whatever happens in between."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def atomic_file(path: Path | str) -> Iterator[IO[bytes]]:
    """Open a file for writing that takes its place only once it is whole and on the disk.

    The bytes go to a temporary file in the same folder (a rename is atomic within one file system only). If the block raises,
    the temporary file is removed and whatever was at `path` before stays as it was.

    Args:
        path: Where the file shall be; its folder must exist.

    Yields:
        The open temporary file.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
