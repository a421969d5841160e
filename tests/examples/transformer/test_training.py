"""Trained by `halfserve train`, it learns to sort in every precision, and is converted to fp16 within the budget."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import halfserve
from amp_core.checkpoint import load_checkpoint
from examples.transformer import __main__ as command
from examples.transformer.data import NO_TARGET, data
from tests.examples.running import run_example

Runs = tuple[Path, dict[str, Any]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """What the command wrote and printed."""
    folder = tmp_path_factory.mktemp("transformer")
    options = ["--epochs", "3", "--device", "cpu", "--out", str(folder), "--json"]
    done = CliRunner().invoke(command.app, options)
    assert done.exit_code == 0, done.output
    return folder, json.loads(done.stdout)["dtypes"]


def test_it_learns_in_every_precision(runs: Runs) -> None:
    targets = data()[1].tensors[1]
    present = targets != NO_TARGET
    # The best without looking at the digits: the commonest one at each place.
    blind = sum(int(targets[:, place][present[:, place]].bincount().max()) for place in range(targets.shape[1]))
    for dtype, figures in runs[1].items():
        assert figures["accuracy"] > 2 * blind / int(present.sum()), dtype
        assert figures["accuracy"] > 0.8, dtype
        assert figures["evaluation_loss"] < 0.3 * math.log(10), dtype


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_mixed_precision_is_as_good_as_float32(runs: Runs, dtype: str) -> None:
    low, full = runs[1][dtype], runs[1]["float32"]
    assert low["accuracy"] == pytest.approx(full["accuracy"], abs=0.01)
    assert low["evaluation_loss"] == pytest.approx(full["evaluation_loss"], rel=0.02)
    assert low["evaluation_loss"] != full["evaluation_loss"]
    assert low["steps"] == full["steps"] == 3 * 32
    assert low["skipped_steps"] <= 2


def test_accumulated_batches_make_nearly_the_same_steps(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "DTYPES", ("bfloat16",))
    options = ["--epochs", "3", "--accumulate", "2", "--device", "cpu", "--out", str(tmp_path), "--json"]
    done = CliRunner().invoke(command.app, options)
    assert done.exit_code == 0, done.output
    low, whole = json.loads(done.stdout)["dtypes"]["bfloat16"], runs[1]["bfloat16"]
    assert low["steps"] == whole["steps"]
    # Not the same: the mean of two batches' means is not the mean over all places, where sequences differ in length.
    assert low["accuracy"] == pytest.approx(whole["accuracy"], abs=0.03)
    assert load_checkpoint(low["checkpoint"]).settings["accumulate"] == 2


def test_the_checkpoint_says_how_it_was_trained(runs: Runs) -> None:
    for dtype, figures in runs[1].items():
        assert (runs[0] / dtype / "train.jsonl").is_file()
        checkpoint = load_checkpoint(figures["checkpoint"])
        assert (checkpoint.dtype, checkpoint.policy) == (dtype, "cuda")
        assert checkpoint.settings["loss"] == "examples.transformer.loss:loss"


def test_it_is_exported_to_fp16_with_proof(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "export",
        runs[1]["float16"]["checkpoint"],
        "--repository",
        str(tmp_path),
        "--name",
        "sorter",
        "--samples",
        "64",
        "--json",
    ]
    with pytest.raises(SystemExit) as end:
        halfserve.main(arguments)
    assert not end.value.code
    version = Path(json.loads(capsys.readouterr().out)["path"])
    assert json.loads((version / "certificate.json").read_text())["passed"] is True
    assert (version / "model.onnx").stat().st_size > 0


def test_a_wrong_policy_ends_it_with_the_commands_line_and_code(tmp_path: Path) -> None:
    done = run_example("transformer", "--policy", "cudda", "--json", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("halfserve train: unknown policy 'cudda'")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("batches", [3, 40, 63])
def test_a_step_is_64_sequences_or_none(batches: int) -> None:
    result = CliRunner().invoke(command.app, ["--accumulate", str(batches)])
    assert result.exit_code == 2
    assert f"64 sequences cannot be cut into {batches} batches of one size" in result.output
