"""Checkpoints that are read, and hold what no run has left in them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

from amp_core.checkpoint import CheckpointError
from amp_core.data import DataError
from amp_core.training.errors import TrainingError
from amp_core.training.train import train
from tests.amp_core.training.runs import killed_in, settings

if TYPE_CHECKING:
    from pathlib import Path


Change = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run that was killed in its second epoch."""
    path = tmp_path_factory.mktemp("killed")
    killed_in(settings(path, checkpoint_every=6), 7)
    return path


def changed(folder: Path, copy: Path, change: Change) -> Path:
    shutil.copytree(folder, copy)
    content = torch.load(copy / "checkpoint.pt", weights_only=True)
    change(content)
    torch.save(content, copy / "checkpoint.pt")
    return copy


def put(*path: Any, value: Any) -> Change:
    def change(content: dict[str, Any]) -> None:
        for key in path[:-1]:
            content = content[key]
        content[path[-1]] = value

    return change


def drop(*path: Any) -> Change:
    def change(content: dict[str, Any]) -> None:
        for key in path[:-1]:
            content = content[key]
        del content[path[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("epoch", value=-1), "has epoch -1, expected 0 or above"),
        (put("step", value=-5), "has step -5, expected 0 or above"),
        (put("batch", value=True), "has batch as bool, expected int"),
        (put("batch", value=99), "cannot skip 99 batches of TensorDataset: an epoch has 4; has the data changed?"),
        (put("weights", value={1: torch.ones(2)}), "the weights do not fit the model that .*:model' builds"),
        (put("optimizer", "state", value=5), "optimizer state does not fit this run: AttributeError"),
        (put("optimizer", "param_groups", value=3), "optimizer state does not fit this run: TypeError"),
        (drop("optimizer", "param_groups"), "optimizer state does not fit this run: KeyError: 'param_groups'"),
        (put("optimizer", "state", 0, "exp_avg", value=torch.ones(3)), "do not fit together: the first step raised RuntimeErr"),
        (put("optimizer", "param_groups", 0, "lr", value="x"), "do not fit together: the first step raised ValueError"),
        (put("scheduler", "last_epoch", value="x"), "scheduler state .*: ValueError: last_epoch is 'x', expected such as 0"),
        (put("scheduler", "last_epoch", value=7), "last_epoch is 7, expected 0 to 6, the steps attempted"),
        (put("scheduler", "base_lrs", value=["a"]), r"base_lrs is \['a'\], expected such as \[0.003\]"),
        (put("scheduler", "base_lrs", value=[]), r"base_lrs is \[\], expected such as"),
        (put("scheduler", "lr_lambdas", value=5), "lr_lambdas is 5, expected such as"),
        (drop("scheduler", "last_epoch"), "scheduler state does not fit this run: KeyError: 'last_epoch'"),
        (
            put("scaler", "scale", value=float("nan")),
            "scaler state does not fit this run: ValueError: the loaded scale must be",
        ),
        (put("rng", value={}), "random state does not fit this run: KeyError: 'cpu'"),
        (put("rng", "cpu", value=torch.zeros(5056, dtype=torch.uint8)), "random state .*: Invalid mt19937 state"),
        (put("rng", "numpy", "key", value=torch.zeros(3)), "random state does not fit this run: IndexError"),
        (put("rng", "python", value={}), "random state does not fit this run: KeyError: 'version'"),
        (put("settings", "world_size", value="many"), "the checkpoint was trained in many processes, this run has 1 process"),
        (put("record", value={"a": 1}), "cannot go on with the checkpoint's record: not a record"),
    ],
)
def test_it_is_refused_in_one_line(killed: Path, tmp_path: Path, change: Change, message: str) -> None:
    folder = changed(killed, tmp_path / "run", change)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises((CheckpointError, TrainingError, DataError), match=message) as error:
        train(settings(folder), resume=True)
    assert "\n" not in str(error.value)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_scheduler_keeps_its_methods(killed: Path, tmp_path: Path) -> None:
    """torch's takes over whatever a state names, `step` too."""
    folder = changed(killed, tmp_path / "run", put("scheduler", "step", value=5))
    assert train(settings(folder), resume=True).steps == 16
