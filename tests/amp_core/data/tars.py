"""Shards for the tests."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np


def write_tar(path: Path, content: Mapping[str, bytes] | Iterable[tuple[str, bytes]]) -> Path:
    entries = content.items() if isinstance(content, Mapping) else content
    with tarfile.open(path, "w") as tar:
        for name, data in entries:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def npy(value: int) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([value, -value], dtype=np.float32))
    return file.getvalue()


def sample(item: int) -> dict[str, bytes]:
    return {f"{item:04d}.image.npy": npy(item), f"{item:04d}.label.cls": str(item).encode()}


def write_shard(path: Path, numbers: Iterable[int]) -> Path:
    """Each sample is ([i, -i], i)."""
    return write_tar(path, [entry for item in numbers for entry in sample(item).items()])
