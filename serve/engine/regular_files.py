"""Open files of a model repository: regular files alone, and without waiting.

To open a named pipe waits for its other end, and to read a device may wait or act. Whoever may write into a repository could
stop every reload that way.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from io import BufferedReader, TextIOWrapper
from pathlib import Path

if sys.platform == "win32":
    FLAGS = os.O_RDONLY | os.O_BINARY
else:
    FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
KINDS = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading, buffered.

    Raises:
        OSError: it is no regular file, or cannot be opened; `strerror` says which.
    """
    _require_regular(path, path.stat())  # first: to open a device may already act on it
    descriptor = os.open(path, FLAGS)
    try:
        _require_regular(path, os.fstat(descriptor))  # another one may have taken its place
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path) -> bytes:
    """Read all of a regular file.

    Raises:
        OSError: it is no regular file, or cannot be read.
    """
    with open_regular(path) as file:
        return file.read()


def read_regular_text(path: Path, encoding: str = "utf-8") -> str:
    r"""Read a regular file of text; "\r\n" and "\r" become "\n".

    Raises:
        OSError: it is no regular file, or cannot be read.
        UnicodeDecodeError: it is no text in this encoding.
    """
    with TextIOWrapper(open_regular(path), encoding=encoding) as file:
        return file.read()


def require_regular(path: Path) -> None:
    """Check that others may open a path; one that is not there is for them to complain of.

    Raises:
        OSError: what lies there is no regular file, or cannot be looked at.
    """
    try:
        _require_regular(path, path.stat())
    except FileNotFoundError:
        return


def _require_regular(path: Path, status: os.stat_result) -> None:
    if stat.S_ISREG(status.st_mode):
        return
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    kind = KINDS.get(stat.S_IFMT(status.st_mode), "something else")
    raise OSError(errno.EINVAL, f"it is {kind}, expected a regular file", str(path))
