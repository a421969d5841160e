from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from halfserve.serve.engine.disk_files import open_regular, read_regular, read_regular_text, require_regular


def make_pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def make_socket(path: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path.name)
    return path


def make_folder(path: Path) -> Path:
    path.mkdir()
    return path


def link_to_device(path: Path) -> Path:
    path.symlink_to("/dev/zero")
    return path


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (make_pipe, "it is a named pipe, expected a regular file"),
        (make_socket, "it is a socket, expected a regular file"),
        (link_to_device, "it is a device, expected a regular file"),
        (make_folder, "Is a directory"),
    ],
)
def test_only_regular_files_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: object, reason: str) -> None:
    assert callable(make)
    monkeypatch.chdir(tmp_path)  # a socket's path has at most 107 bytes
    path = make(tmp_path / "it")
    for read in (open_regular, read_regular, read_regular_text, require_regular):
        with pytest.raises(OSError, match=reason) as refused:
            read(path)
        assert refused.value.strerror == reason


def test_regular_files_and_links_to_them_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r")
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link"):
        assert read_regular(tmp_path / name) == b"\xef\xbb\xbfone\r\ntwo\r"
        assert read_regular_text(tmp_path / name, "utf-8-sig") == "one\ntwo\n"


def test_a_missing_file_passes_the_check(tmp_path: Path) -> None:
    require_regular(tmp_path / "absent")
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "absent")
