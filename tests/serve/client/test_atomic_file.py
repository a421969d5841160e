from __future__ import annotations

from pathlib import Path

import pytest

from serve.client.atomic_file import checked_output, written_whole


def test_replaces_the_file_when_done(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    with written_whole(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o644


def test_leaves_what_was_there_when_interrupted(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError, match="division"), written_whole(path) as file:
        file.write(b"half%d" % (1 // 0))
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_output_is_checked_before_there_is_anything_to_write(tmp_path: Path) -> None:
    assert checked_output(tmp_path / "new.json", "--output") == tmp_path / "new.json"
    with pytest.raises(IsADirectoryError, match="--output .*: is a folder, expected the name of a file"):
        checked_output(tmp_path, "--output")
    with pytest.raises(FileNotFoundError, match="--plot .*: there is no folder .*nowhere; make it first"):
        checked_output(tmp_path / "nowhere" / "x.png", "--plot")
