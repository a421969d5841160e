from __future__ import annotations

from pathlib import Path

import matplotlib.image
import pytest

from serve.benchmark.plot import write_plot
from tests.serve.benchmark.levels import level, report


def test_draws_a_picture(tmp_path: Path) -> None:
    write_plot(tmp_path / "a.png", report(level(1), level(16), level(4)))
    write_plot(tmp_path / "b.png", report(level(1), level(16), level(64)))
    first, second = (matplotlib.image.imread(tmp_path / name) for name in ("a.png", "b.png"))
    assert first.shape == second.shape == (1050, 1200, 4)
    assert 0.01 < (first[..., :3] < 0.9).any(axis=2).mean() < 0.5
    assert (first != second).any()


def test_one_level_is_enough(tmp_path: Path) -> None:
    write_plot(tmp_path / "a.png", report(level(1), provider=None))
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        write_plot(tmp_path / "nowhere" / "a.png", report(level(1)))
    assert list(tmp_path.iterdir()) == []
