"""What `python -m examples.checkerboard` prints and draws."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib.image
import pytest
import torch

from examples.checkerboard import __main__ as command
from examples.checkerboard.image import checkerboard
from examples.checkerboard.picture import draw
from examples.checkerboard.report import remarks, summary, table
from examples.checkerboard.settings import Settings
from examples.checkerboard.training import Outcome
from tests.examples.running import run_example

SMALL = ["--steps", "4", "--size", "12", "--width", "8", "--device", "cpu"]


def outcome(dtype: str, milliseconds: float, loss: float = 0.25, peak_bytes: int | None = None) -> Outcome:
    return Outcome(
        dtype=dtype,
        loss=loss,
        seconds=1.0,
        milliseconds_per_step=milliseconds,
        skipped_steps=3,
        scale=1024.0,
        peak_bytes=peak_bytes,
        image=torch.full((8, 8), 0.5),
    )


def test_it_prints_one_json_object_and_draws_a_panel_per_precision(tmp_path: Path) -> None:
    done = run_example("checkerboard", *SMALL, "--dtype", "bfloat16", "--json", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    printed = json.loads(done.stdout)
    assert [row["dtype"] for row in printed["outcomes"]] == ["float32", "bfloat16"]
    assert all(0 < row["loss"] < 5 for row in printed["outcomes"])
    assert (printed["device"], printed["steps"], printed["size"]) == ("cpu", 4, 12)
    assert matplotlib.image.imread(tmp_path / printed["picture"]).shape[:2] == (330, 900)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "no-such"], "checkerboard: device 'no-such' cannot be used here"),
        (["--squares", "99"], "checkerboard: an image of 12 pixels has no room for 99 squares a side"),
        (["--out", "."], "checkerboard: . is a folder; expected the name of a PNG to write, such as checkerboard.png"),
        (["--out", "file/board.png"], "checkerboard: cannot write into the folder file: File exists"),
    ],
)
def test_a_mistake_is_one_line_and_found_before_the_work(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["checkerboard", *SMALL, *options])
    monkeypatch.setattr(command, "train", lambda *_: pytest.fail("it trained"))
    with pytest.raises(SystemExit) as end:
        command.main()
    printed = capsys.readouterr()
    assert (end.value.code, printed.out) == (1, "")
    assert printed.err.startswith(message)
    assert printed.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_speed_is_told_beside_float32_and_slowness_explained() -> None:
    outcomes = [outcome("float32", 10.0), outcome("float16", 40.0), outcome("bfloat16", 5.0)]
    rows = list(table(outcomes).columns[4].cells)
    assert rows == ["1.00x", "0.25x", "2.00x"]
    (remark,) = remarks(outcomes, torch.device("cpu"))
    assert remark.startswith("float16 took 4.0 times as long as float32: a CPU without instructions for it has to convert")
    assert "too small to fill the device" in remarks(outcomes, torch.device("cuda"))[0]


def test_memory_has_a_column_where_it_was_measured() -> None:
    with_memory = table([outcome("float32", 10.0, peak_bytes=3 * 2**20)])
    assert list(with_memory.columns[-1].cells) == ["3 MiB"]
    assert len(table([outcome("float32", 10.0)]).columns) == len(with_memory.columns) - 1


def test_a_loss_that_is_not_finite_is_null_in_json() -> None:
    printed = summary(Settings(device=torch.device("cpu")), [outcome("float16", 1.0, loss=float("nan"))], "x.png")
    assert json.loads(json.dumps(printed, allow_nan=False))["outcomes"][0]["loss"] is None


def test_the_picture_shows_the_target_first(tmp_path: Path) -> None:
    path = tmp_path / "board.png"
    path.write_bytes(draw(checkerboard(8, 2)[0, 0], [outcome("float32", 1.0)]))
    panels = matplotlib.image.imread(path)[100:300, :, 0]
    assert panels.shape == (200, 600)
    left, right = panels[:, 20:280], panels[:, 320:580]
    assert (left.min(), left.max()) == (0.0, 1.0)
    assert right.mean() == pytest.approx(0.5, abs=0.02)
    assert right.std() < 0.01
