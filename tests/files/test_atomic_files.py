from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from halfserve.files.atomic_files import atomic_file, checked_output


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


@pytest.mark.parametrize(("old", "umask", "expected"), [(None, 0o022, 0o644), (None, 0o077, 0o600), (0o640, 0o022, 0o640)])
def test_permissions_are_those_of_any_file(tmp_path: Path, old: int | None, umask: int, expected: int) -> None:
    path = tmp_path / "a.bin"
    if old is not None:
        path.touch()
        path.chmod(old)
    before = os.umask(umask)
    try:
        with atomic_file(path) as file:
            file.write(b"new")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == expected


def test_a_symbolic_link_stays_one(tmp_path: Path) -> None:
    link, target = tmp_path / "link.bin", tmp_path / "elsewhere" / "a.bin"
    target.parent.mkdir()
    link.symlink_to(target)
    for text in (b"first", b"second"):
        with atomic_file(checked_output(link, "--output")) as file:
            file.write(text)
        assert link.is_symlink()
        assert target.read_bytes() == text
    assert list(target.parent.iterdir()) == [target]


def test_what_is_no_file_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as threads:
        read = threads.submit(pipe.read_bytes)
        with atomic_file(checked_output(pipe, "--output")) as file:
            file.write(b"text")
        assert read.result(60) == b"text"
    assert pipe.is_fifo()


@pytest.mark.parametrize("refused", ["open", "write", "fsync", "chmod", "replace"])
def test_what_the_system_refuses_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *([".a.bin.0123"] if refused == "replace" else []))

    def write() -> None:
        with atomic_file(path):
            if refused == "write":
                refuse()

    if refused != "write":
        monkeypatch.setattr(os if refused == "fsync" else Path, refused, refuse)
    with pytest.raises(OSError, match=rf"^\[Errno {errno.ENOSPC}\] No space left on device: '{path}'$"):
        write()
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_output_is_checked_before_there_is_anything_to_write(tmp_path: Path) -> None:
    assert checked_output(tmp_path / "new.json", "--output") == tmp_path / "new.json"
    with pytest.raises(IsADirectoryError, match="--output .*: is a folder, expected the name of a file"):
        checked_output(tmp_path, "--output")
    with pytest.raises(FileNotFoundError, match="--plot .*: there is no folder .*nowhere; make it first"):
        checked_output(tmp_path / "nowhere" / "x.png", "--plot")
