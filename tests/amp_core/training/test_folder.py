"""Who may write into a folder, and what a run finds and leaves there."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

import pytest

from amp_core.factory import FactoryError
from amp_core.training.errors import TrainingError
from amp_core.training.folder import own_folder
from amp_core.training.train import Progress, train
from tests.amp_core.tiny_task import HERE
from tests.amp_core.training.runs import Halfserve, command, settings

if TYPE_CHECKING:
    from pathlib import Path


def test_two_runs_in_one_folder_are_kept_apart(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with own_folder(out):
        ended = Halfserve(tmp_path / "process", command(out)).ended()
        owner = (out / ".lock").read_text()
    assert ended.code == 1
    assert ended.err == f"halfserve train: another run (process {owner}) is writing into {out}; choose another folder\n"
    assert Halfserve(tmp_path / "process", command(out, "--epochs", "1")).ended().code == 0


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TrainingError, match="cannot write into the folder .*file: File exists"):
        train(settings(tmp_path / "file"))
    with pytest.raises(TrainingError, match="cannot write into the folder .*: Not a directory"):
        train(settings(tmp_path / "file" / "below"))


@pytest.mark.parametrize("room_bytes", [0, 50, 500])
def test_a_folder_that_takes_no_more_is_named(tmp_path: Path, room_bytes: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, hard))
    try:
        with pytest.raises(TrainingError, match=f"^cannot write into the folder {tmp_path}: File too large$"):
            train(settings(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_unfinished_files_of_a_killed_run_are_removed_and_others_are_not(tmp_path: Path) -> None:
    for name in (".checkpoint.pt.12-34.tmp", ".train.jsonl.12-34.tmp", ".mine.tmp", "checkpoint.pt.tmp"):
        (tmp_path / name).touch()
    with own_folder(tmp_path):
        assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", ".mine.tmp", "checkpoint.pt.tmp"]


@pytest.mark.parametrize("there", [".", "runs", "runs/first"])
def test_a_run_that_cannot_start_leaves_no_folder_of_its_own(tmp_path: Path, there: str) -> None:
    (tmp_path / there).mkdir(parents=True, exist_ok=True)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(FactoryError, match="there is no module 'nope'"):
        train(settings(tmp_path / "runs" / "first" / "out", model="nope:model"))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_that_ends_early_leaves_what_it_wrote(tmp_path: Path) -> None:
    def interrupt(_: Progress) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        train(settings(out), on_step=interrupt)
    assert (out / "train.jsonl").is_file()


def test_a_new_run_keeps_the_checkpoint_of_the_one_before(tmp_path: Path) -> None:
    before = train(settings(tmp_path, seed=1)).checkpoint.read_bytes()
    with pytest.raises(TrainingError, match="do not fit together"):
        train(settings(tmp_path, model=f"{HERE}:wrong_width"))
    assert (tmp_path / "checkpoint.pt").read_bytes() == before
    assert not (tmp_path / "checkpoint.previous.pt").exists()
    train(settings(tmp_path))
    assert (tmp_path / "checkpoint.previous.pt").read_bytes() == before
