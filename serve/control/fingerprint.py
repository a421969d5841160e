"""Tell whether files have changed, without reading them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

MAX_DEPTH = 4  # below a model's folder: version, twin, and data files in folders of their own

Fingerprint: TypeAlias = tuple[tuple[str, int, int, int, int, int], ...]


def fingerprint(path: Path) -> Fingerprint:
    """Path, device, inode, times of change and size of a file, or of all files below a folder; hidden ones do not count.

    Two times: builds that can be repeated give all of their files the same one, and `cp -p` keeps it. The system's own tells.
    A folder that changes meanwhile gives what was seen of it; () is nothing at all.
    """
    if os.path.isdir(path):  # noqa: PTH112  (pathlib's raises where a folder above may not be looked into)
        return tuple(sorted(_below(path, "", MAX_DEPTH)))
    return tuple(_entry(path, path.name))


def _below(folder: Path, prefix: str, depth: int) -> Iterator[tuple[str, int, int, int, int, int]]:
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        name = f"{prefix}{entry.name}"
        if entry.name.startswith("."):
            continue
        if not _is_folder(entry):
            yield from _entry(Path(entry.path), name)
        elif depth > 1:
            yield from _below(Path(entry.path), f"{name}/", depth - 1)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # such as a link that leads to itself
        return False


def _entry(path: Path, name: str) -> Iterator[tuple[str, int, int, int, int, int]]:
    try:
        status = path.stat()
    except OSError:
        return
    yield name, status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size
