from __future__ import annotations

import re
from pathlib import Path

import pytest

from serve.engine.errors import FailedPreconditionError
from serve.observability.line_file import LineFile, check_writable


def test_lines_are_appended_to_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    path.write_text("old\n")
    file = LineFile(path)
    file.write(["one\n", "two\n"])
    file.write(["three\n"])
    file.close()
    file.write(["four\n"])
    file.close()
    assert path.read_text() == "old\none\ntwo\nthree\nfour\n"


def test_a_file_that_was_moved_away_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    file = LineFile(path)
    file.write(["one\n"])
    path.rename(tmp_path / "access.log.1")
    file.write(["two\n"])
    path.unlink()
    file.write(["three\n"])
    file.close()
    assert (tmp_path / "access.log.1").read_text() == "one\n"
    assert path.read_text() == "three\n"


def test_a_file_that_was_moved_away_is_let_go_of(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    file = LineFile(path)
    for number in range(3):
        file.write(["line\n"])
        file.write(["line\n"])
        path.rename(tmp_path / f"access.log.{number}")
    held = {link.resolve() for link in Path("/proc/self/fd").iterdir()}
    assert [number for number in range(3) if tmp_path / f"access.log.{number}" in held] == [2]
    file.close()


def test_without_a_path_lines_go_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    file = LineFile(None)
    file.write(["one\n"])
    file.close()
    assert capfd.readouterr().err == "one\n"


@pytest.mark.parametrize(
    ("place", "reason"),
    [("no/access.log", "/no is no folder"), (".", "it is a folder, expected a file")],
    ids=["no-folder", "a-folder"],
)
def test_a_place_is_checked_before_the_first_line(tmp_path: Path, place: str, reason: str) -> None:
    check_writable(tmp_path / "access.log", "the access log")
    with pytest.raises(FailedPreconditionError) as refused:
        check_writable(tmp_path / place, "the access log")
    assert str(refused.value).startswith(f"the access log cannot be written to {tmp_path / place}: ")
    assert str(refused.value).endswith(f"{reason}; choose another file")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=re.escape("No such file or directory")):
        LineFile(tmp_path / "no" / "access.log").write(["one\n"])
