"""Unix sockets that only the server's own user can open."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OWN_USER = 0o077  # what is taken away from others


@contextmanager
def private_files() -> Iterator[None]:
    """Whatever is made meanwhile can be opened by this user alone; from its first moment, not from a later chmod on."""
    before = os.umask(OWN_USER)
    try:
        yield
    finally:
        os.umask(before)


def private_socket(path: Path) -> socket.socket:
    """A bound Unix socket. One that a server has left there, and that nobody listens on, gives way.

    Raises:
        OSError: somebody listens there, it is another kind of file, or the folder cannot be written.
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
            return  # to bind says what is wrong
    except OSError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
