from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from export.files.file_window import WINDOW_BYTES, FileWindow

CONTENT = bytes(range(251)) * 1000


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("window") / "file"
    path.write_bytes(CONTENT)
    return path


@given(positions=st.lists(st.integers(0, len(CONTENT) - 1), max_size=20))
def test_bytes_are_the_files_in_any_order(file: Path, positions: list[int]) -> None:
    with file.open("rb") as opened:
        window = FileWindow(opened)
        assert [window.byte(position) for position in positions] == [CONTENT[position] for position in positions]


@given(start=st.integers(0, len(CONTENT)), length=st.integers(0, 2 * WINDOW_BYTES))
def test_pieces_end_with_the_file(file: Path, start: int, length: int) -> None:
    with file.open("rb") as opened:
        window = FileWindow(opened)
        assert window.piece(start, start + length) == CONTENT[start : start + length]
        assert len(window) == len(CONTENT)


def test_nothing_lies_behind_the_end(file: Path) -> None:
    with file.open("rb") as opened, pytest.raises(IndexError):
        FileWindow(opened).byte(len(CONTENT))
