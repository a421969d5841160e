from __future__ import annotations

from pathlib import Path

import pytest

from export.atomic_write import write_and_sync, write_atomically
from export.errors import ExportError


def test_it_replaces_the_file_and_leaves_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.mkdir()
    with pytest.raises(ExportError, match=r"cannot write .*file: Is a directory"):
        write_atomically(path, b"new")
    assert list(tmp_path.iterdir()) == [path]


def test_new_files_never_overwrite(tmp_path: Path) -> None:
    write_and_sync(tmp_path / "file", b"first")
    with pytest.raises(FileExistsError):
        write_and_sync(tmp_path / "file", b"second")
    assert (tmp_path / "file").read_bytes() == b"first"
