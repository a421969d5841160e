"""Unix sockets that only the server's own user can open."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OTHER_USERS = 0o077


@contextmanager
def private_files() -> Iterator[None]:
    """Make files inside this context inaccessible to other users from the start, not only after a chmod."""
    before = os.umask(OTHER_USERS)
    try:
        yield
    finally:
        os.umask(before)


def private_socket(path: Path) -> socket.socket:
    """Return a bound Unix socket. An abandoned socket file, one without a listener, is replaced.

    Raises:
        OSError: another server listens there, the path is another kind of file, or the folder cannot be written.
    """
    _remove_abandoned(path)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with private_files():
            bound.bind(str(path))
    except BaseException:
        bound.close()
        raise
    return bound


def _remove_abandoned(path: Path) -> None:
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return  # bind reports the other kind of file
    except OSError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
