"""Temporary folders that nobody leaves behind, also where the process ends while a thread still uses one."""

from __future__ import annotations

import tempfile
from weakref import WeakSet

_folders: WeakSet[tempfile.TemporaryDirectory[str]] = WeakSet()


def temporary_folder(prefix: str) -> tempfile.TemporaryDirectory[str]:
    """A new folder, which whoever asked for it removes.

    Raises:
        OSError: there is no place for it.
    """
    folder = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
    _folders.add(folder)
    return folder


def remove_temporary_folders() -> None:
    """Remove all that are there; the process is about to end without asking those who use them."""
    for folder in list(_folders):
        folder.cleanup()
