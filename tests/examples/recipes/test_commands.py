"""The recipes run by their names."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from examples.recipes.precision import Precision, report
from examples.recipes.task import device_in_use
from tests.examples.running import run_example

SMALL = {
    "accumulation": ["--steps", "3", "--batches", "2"],
    "gradient_penalty": ["--steps", "3"],
    "several_optimizers": ["--steps", "3"],
}


def test_one_of_them_for_real(tmp_path: Path) -> None:
    done = run_example("recipes.several_optimizers", "--steps", "12", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    heading, full, low = done.stdout.splitlines()
    assert heading.split()[0] == "dtype"
    assert (full.split()[0], low.split()[0]) == ("float32", "float16")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", SMALL)
def test_each_prints_one_json_object_with_finite_figures(name: str) -> None:
    app = importlib.import_module(f"examples.recipes.{name}").app
    printed = json.loads(CliRunner().invoke(app, [*SMALL[name], "--json"]).stdout)
    assert list(printed)[-2:] == ["float32", "float16"]
    assert all(isinstance(figure, float | int) for row in printed.values() for figure in row.values())
    assert printed["float16"] != printed["float32"]


@pytest.mark.parametrize("name", SMALL)
def test_a_wrong_option_is_refused(name: str) -> None:
    app = importlib.import_module(f"examples.recipes.{name}").app
    done = CliRunner().invoke(app, ["--steps", "0"])
    assert done.exit_code == 2
    assert "Invalid value for '--steps'" in done.output


def test_what_is_not_finite_is_null_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    report({"float16": {"loss": math.nan, "scale": 2.0}}, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"float16": {"loss": None, "scale": 2.0}}


@pytest.mark.parametrize(
    ("dtype", "inside", "scaled"),
    [(torch.float32, torch.float32, False), (torch.float16, torch.float16, True), (torch.bfloat16, torch.bfloat16, False)],
)
def test_a_precision_is_a_region_and_a_scaler(dtype: torch.dtype, inside: torch.dtype, scaled: bool) -> None:
    precision, square = Precision.of(dtype), torch.ones(2, 2, device=device_in_use())
    with precision.region:
        assert (square @ square).dtype is inside
    assert precision.scaler.is_enabled() is scaled
