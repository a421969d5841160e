from __future__ import annotations

import os
from pathlib import Path

import pytest

from export.errors import ExportError
from export.files.atomic_write import waiting_file, write_and_sync, write_atomically


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


def test_a_name_that_no_file_can_have_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"cannot write .*: File name too long"):  # nor can the temporary one be removed
        write_atomically(tmp_path / ("n" * 250), b"new")


def test_a_device_is_written_to_and_stays_one(tmp_path: Path) -> None:
    device, terminal = os.openpty()
    link = tmp_path / "link"
    link.symlink_to(os.ttyname(terminal))
    write_atomically(link, b"new")
    assert link.is_char_device()
    assert os.read(device, 3) == b"new"


def test_a_link_goes_on_pointing_to_its_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "link").symlink_to("file")
    write_atomically(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"new"


def test_what_is_not_put_there_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")

    def fail() -> None:
        with waiting_file(tmp_path / "file", b"new"):
            assert len(list(tmp_path.iterdir())) == 2
            raise OSError("the model beside it")

    with pytest.raises(OSError, match="the model beside it"):
        fail()
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"old")]


def test_new_files_never_overwrite(tmp_path: Path) -> None:
    write_and_sync(tmp_path / "file", b"first")
    with pytest.raises(FileExistsError):
        write_and_sync(tmp_path / "file", b"second")
    assert (tmp_path / "file").read_bytes() == b"first"
