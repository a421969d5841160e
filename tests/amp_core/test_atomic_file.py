from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from amp_core.atomic_file import atomic_file

if TYPE_CHECKING:
    from pathlib import Path


def test_the_new_file_takes_the_old_ones_place_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with atomic_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write_half() -> None:
        with atomic_file(path) as file:
            file.write(b"half of the ne")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_half()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_folder_is_the_callers_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), atomic_file(tmp_path / "nowhere" / "file"):
        pass
