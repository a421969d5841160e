"""`python -m halfserve.examples.checkerboard`: the image, the training in each precision, and what it prints and draws."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib.image
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

from halfserve import autocast
from halfserve.examples.checkerboard import __main__ as command
from halfserve.examples.checkerboard.__main__ import draw, remarks, summary, table
from halfserve.examples.checkerboard.training import (
    CheckerboardError,
    CheckerboardResult,
    CheckerboardSettings,
    checkerboard,
    coordinate_grid,
    device_named,
    network,
    train,
)

pytestmark = pytest.mark.long

SMALL = CheckerboardSettings(device=torch.device("cpu"), steps=40, size=16, squares=2, width=48)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, CheckerboardResult]:
    return {dtype: train(SMALL, dtype) for dtype in ("float32", "float16", "bfloat16")}


def test_the_network_has_the_layers_that_it_is_known_for() -> None:
    layers = list(network())
    convolutions = [layer for layer in layers if isinstance(layer, nn.Conv2d)]
    assert [(c.in_channels, c.out_channels, c.kernel_size) for c in convolutions] == [
        (2, 256, (1, 1)), (256, 256, (1, 1)), (256, 256, (1, 1)), (256, 1, (1, 1))
    ]  # fmt: skip
    assert [type(layer) for layer in layers[:-1]] == [nn.Conv2d, nn.BatchNorm2d, nn.ReLU] * 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_mixed_precision_the_convolutions_are_low_and_the_weights_are_not(dtype: torch.dtype) -> None:
    model = network(8)
    with autocast("cpu", dtype):
        assert model(coordinate_grid(4)).dtype is dtype
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_every_precision_learns_the_picture(outcomes: dict[str, CheckerboardResult]) -> None:
    board = checkerboard(16, 2)[0, 0]
    grey = float((board - board.mean()).square().mean())
    for dtype, outcome in outcomes.items():
        assert outcome.loss < 0.2 * grey, f"{dtype} is no better than a grey image"
        assert outcome.loss == pytest.approx(float((outcome.image - board).square().mean()))
        assert ((outcome.image > 0.5) == (board > 0.5)).float().mean() > 0.95
        assert (outcome.image.shape, outcome.image.dtype) == ((16, 16), torch.float32)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_mixed_precision_ends_near_float32(outcomes: dict[str, CheckerboardResult], dtype: str) -> None:
    assert outcomes[dtype].loss == pytest.approx(outcomes["float32"].loss, abs=0.02)


def test_only_float16_is_scaled(outcomes: dict[str, CheckerboardResult]) -> None:
    assert outcomes["float16"].scale == 2.0 ** (16 - outcomes["float16"].skipped_steps)
    assert [(outcomes[dtype].scale, outcomes[dtype].skipped_steps) for dtype in ("float32", "bfloat16")] == [(1.0, 0)] * 2


def test_on_the_cpu_there_is_time_but_no_device_memory_to_report(outcomes: dict[str, CheckerboardResult]) -> None:
    for outcome in outcomes.values():
        assert outcome.peak_bytes is None
        assert outcome.milliseconds_per_step > 0
        assert outcome.seconds > 0


def test_the_same_seed_gives_the_same_picture_and_leaves_the_random_state_alone() -> None:
    before, calls = torch.get_rng_state(), list[int]()
    short = dataclasses.replace(SMALL, steps=3)
    first, second = (train(short, "bfloat16", lambda: calls.append(1)) for _ in range(2))
    other = train(dataclasses.replace(short, seed=1), "bfloat16")
    assert torch.equal(first.image, second.image)
    assert not torch.equal(first.image, other.image)
    assert torch.equal(torch.get_rng_state(), before)
    assert len(calls) == 6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_mixed_precision_takes_less_memory() -> None:
    settings = dataclasses.replace(SMALL, device=torch.device("cuda"), size=256, steps=20, width=256)
    full, half = (train(settings, dtype) for dtype in ("float32", "float16"))
    assert full.peak_bytes is not None
    assert half.peak_bytes is not None
    assert half.peak_bytes < 0.8 * full.peak_bytes
    assert half.loss == pytest.approx(full.loss, abs=0.05)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"width": 0}, "width must be at least 1, got 0"),
        ({"size": 1, "squares": 1}, "size must be at least 2 pixels, got 1"),
        ({"squares": 17}, "an image of 16 pixels has no room for 17 squares a side"),
        ({"learning_rate": float("nan")}, "learning_rate must be between 0 and 1, got nan"),
        ({"seed": -1}, "seed must be between 0"),
        ({"policy": "cudda"}, "unknown policy 'cudda'"),
    ],
)
def test_a_setting_out_of_range_is_refused(change: dict[str, object], message: str) -> None:
    replace: Callable[..., CheckerboardSettings] = dataclasses.replace
    with pytest.raises(CheckerboardError, match=message):
        replace(SMALL, **change)


@pytest.mark.parametrize("name", ["no-such", "cpu:x", "meta"])
def test_a_device_that_cannot_compute_is_refused(name: str) -> None:
    with pytest.raises(CheckerboardError, match=f"device '{name}' cannot be used here .*; try 'cpu' or 'auto'"):
        device_named(name)


def test_the_grid_gives_x_along_the_row_and_y_down_the_column() -> None:
    grid = coordinate_grid(5)
    assert (grid.shape, grid.dtype) == ((1, 2, 5, 5), torch.float32)
    along = [-1.0, -0.5, 0.0, 0.5, 1.0]
    assert grid[0, 0].tolist() == [along] * 5
    assert grid[0, 1].T.tolist() == [along] * 5


@given(st.integers(1, 12), st.integers(1, 5))
def test_every_field_differs_from_its_neighbours(squares: int, pixels: int) -> None:
    board = checkerboard(squares * pixels, squares)[0, 0]
    fields = board[::pixels, ::pixels]
    assert board.tolist() == fields.repeat_interleave(pixels, 0).repeat_interleave(pixels, 1).tolist()
    assert (fields[1:] + fields[:-1] == 1).all()
    assert (fields[:, 1:] + fields[:, :-1] == 1).all()
    assert fields[0, 0] == 0


OPTIONS = ["--steps", "4", "--size", "12", "--width", "8", "--device", "cpu"]


def outcome(dtype: str, milliseconds: float, loss: float = 0.25, peak_bytes: int | None = None) -> CheckerboardResult:
    return CheckerboardResult(
        dtype=dtype,
        loss=loss,
        seconds=1.0,
        milliseconds_per_step=milliseconds,
        skipped_steps=3,
        scale=1024.0,
        peak_bytes=peak_bytes,
        image=torch.full((8, 8), 0.5),
    )


def test_it_prints_one_json_object_and_draws_a_panel_per_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(command.app, [*OPTIONS, "--dtype", "bfloat16", "--json"])
    assert (done.exit_code, done.stderr) == (0, "")
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
    monkeypatch.setattr(sys, "argv", ["checkerboard", *OPTIONS, *options])
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
    printed = summary(CheckerboardSettings(device=torch.device("cpu")), [outcome("float16", 1.0, loss=float("nan"))], "x.png")
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
