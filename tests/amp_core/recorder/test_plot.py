"""The picture: written whole or not at all, and readable for few and many layers."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from amp_core.recorder import Record, plot
from amp_core.recorder.plot import _draw
from tests.amp_core.recorder.recording import entry


def record_of(layers: int, **values: Any) -> Record:
    found = []
    for i in range(layers):
        name = f"model.encoder.layers.{i}.self_attention.output_projection"
        found.append(entry(name, largest=2.0**i, smallest=2.0**-i, **values))
        gradients: dict[str, Any] = {"largest": 2.0**-i, "smallest": 2.0 ** (-i - 8)}
        unscaled: dict[str, Any] = {"unscaled_largest": 2.0 ** (-i - 4), "unscaled_smallest": 2.0 ** (-i - 12)}
        found.append(entry(name, direction="backward", **gradients, **unscaled))
    return Record(entries=tuple(found), steps=2)


@pytest.mark.parametrize(("ending", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("PDF", b"%PDF")])
def test_the_ending_chooses_the_format(tmp_path: Path, ending: str, start: bytes) -> None:
    plot(record_of(3), tmp_path / f"range.{ending}")
    assert (tmp_path / f"range.{ending}").read_bytes().startswith(start)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("name", ["range.bmp", "range"])
def test_another_ending_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="expected a file name that ends in .png, .svg or .pdf"):
        plot(record_of(3), tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_picture_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_figure: Figure, file: Any, **_options: Any) -> None:
        file.write(b"half a picture")
        raise OSError("disk full")

    (tmp_path / "range.png").write_bytes(b"old")
    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(OSError, match="disk full"):
        plot(record_of(1), tmp_path / "range.png")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("range.png", b"old")]


@pytest.mark.parametrize("layers", [1, 3, 60])
def test_names_neither_overlap_nor_leave_the_picture(layers: int) -> None:
    figure = _draw(record_of(layers), 120)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    boxes = [label.get_window_extent() for label in axes.get_yticklabels()]
    assert len(boxes) == layers
    assert all(upper.y0 >= lower.y1 for upper, lower in pairwise(boxes))
    assert min(box.x0 for box in boxes) >= 0
    limits = [text.get_window_extent() for text in axes.texts]
    assert len(limits) == 3
    assert all(left.x1 < right.x0 for left, right in pairwise(limits))
    title = figure.get_suptitle()
    assert title == "Ranges in 2 recorded steps, against float16"


def test_bars_show_the_ranges_and_the_axis_holds_them() -> None:
    figure = _draw(record_of(40, non_finite=1), 120)
    (axes,) = figure.axes
    forward, backward = axes.containers
    assert [bar.get_x() for bar in forward][2] == 0.25
    assert [bar.get_x() + bar.get_width() for bar in backward][1] == 0.5
    low, high = axes.get_xlim()
    assert low < 2.0**-51  # of the gradients without their scale
    assert high > 2.0**39
    (legend,) = figure.legends
    assert {text.get_text() for text in legend.get_texts()} == {
        *("forward", "backward, as it ran", "backward without the loss scale", "forward: infinite or NaN too")
    }


def test_of_many_modules_those_nearest_the_limits_are_drawn() -> None:
    figure = _draw(record_of(16), 4)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert [label.partition("…")[0].split(".")[3] for label in labels] == ["12", "13", "14", "15"]
    assert figure.get_suptitle().endswith("the 4 of 16 modules nearest its limits")


def test_an_empty_record_says_so(tmp_path: Path) -> None:
    (text,) = (text.get_text() for text in _draw(Record(), 120).axes[0].texts if "nothing" in text.get_text())
    assert text == "nothing was recorded"
    plot(Record(), tmp_path / "range.png")


def test_matplotlib_is_imported_only_to_draw() -> None:
    code = "import sys, amp_core.recorder; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
