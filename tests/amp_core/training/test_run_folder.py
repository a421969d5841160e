"""What a run writes into its folder: lock, curves, record."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
    EventAccumulator,
)

from halfserve.amp_core import recorder
from halfserve.amp_core.checkpoint import load_checkpoint
from halfserve.amp_core.factory import FactoryError
from halfserve.amp_core.training.run_folder import Curves, locked_folder
from halfserve.amp_core.training.train import train
from halfserve.amp_core.training.training_settings import TrainingError
from halfserve.amp_core.weights.file_kinds import WeightsError
from tests.amp_core.tiny_task import HERE
from tests.amp_core.training.runs import Halfserve, assert_same_run, assert_same_weights, command, killed_in, log, settings


@pytest.mark.long
def test_two_runs_in_one_folder_are_kept_apart(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with locked_folder(out):
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
    with locked_folder(tmp_path):
        assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", ".mine.tmp", "checkpoint.pt.tmp"]


@pytest.mark.parametrize("there", [".", "runs", "runs/first"])
def test_a_run_that_cannot_start_leaves_no_folder_of_its_own(tmp_path: Path, there: str) -> None:
    (tmp_path / there).mkdir(parents=True, exist_ok=True)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(FactoryError, match="there is no module 'nope'"):
        train(settings(tmp_path / "runs" / "first" / "out", model="nope:model"))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_new_run_keeps_the_checkpoint_of_the_one_before(tmp_path: Path) -> None:
    before = train(settings(tmp_path, seed=1)).checkpoint.read_bytes()
    with pytest.raises(TrainingError, match="do not fit together"):
        train(settings(tmp_path, model=f"{HERE}:wrong_width"))
    assert (tmp_path / "checkpoint.pt").read_bytes() == before
    assert not (tmp_path / "checkpoint.previous.pt").exists()
    train(settings(tmp_path))
    assert (tmp_path / "checkpoint.previous.pt").read_bytes() == before


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events: Any = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def expected(folder: Path) -> dict[str, list[tuple[int, Any]]]:
    """What the log says, in TensorBoard's terms."""
    lines, found, skipped, step = log(folder), dict[str, list[tuple[int, Any]]](), 0, 0
    for line in lines:
        if "step" in line:
            step, skipped = line["step"], skipped + line["skipped"]
            values = {
                "loss/training": line["loss"],
                "scale": line["scale"],
                "skipped_steps": skipped,
                "gradient_norm": line["gradient_norm"],
                "learning_rate": line["learning_rate"],
            }
        else:
            values = {"loss/held_out": line["evaluation_loss"], "accuracy/held_out": line["accuracy"]}
        for name, value in values.items():
            if value is not None:
                found.setdefault(name, []).append((step, pytest.approx(value)))
    return found


@pytest.mark.parametrize("model", ["model", "Overflowing"])
def test_the_curves_are_what_the_log_says(tmp_path: Path, model: str) -> None:
    train(settings(tmp_path, model=f"{HERE}:{model}", tensorboard=True))
    found = curves(tmp_path)
    assert found == expected(tmp_path)
    assert found["skipped_steps"][-1][1] == (0 if model == "model" else 6)


def test_a_resumed_run_writes_no_step_twice(tmp_path: Path) -> None:
    run = settings(tmp_path, model=f"{HERE}:Overflowing", tensorboard=True, checkpoint_every=3)
    killed_in(run, 8)
    killed_in(run, 11, resume=True)
    train(run, resume=True)
    assert [step for step, _ in curves(tmp_path)["scale"]] == list(range(1, 17))
    assert curves(tmp_path) == expected(tmp_path)


def test_a_folder_that_is_taken_away_is_an_error_and_no_stack_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[Any] = []
    hook = printed.append
    monkeypatch.setattr(threading, "excepthook", hook)

    def write() -> None:
        with Curves(tmp_path / "gone", steps_done=0, skipped_steps=0) as written:
            written.sync()
            shutil.rmtree(tmp_path / "gone")
            for step in range(100):
                written.write_evaluation({"loss": 1.0}, step)
                written.sync()

    with pytest.raises(FileNotFoundError):
        write()
    assert (printed, threading.excepthook) == ([], hook)
    other = threading.Thread(target=lambda: 1 / 0)
    with Curves(tmp_path / "there", steps_done=0, skipped_steps=0):
        other.start()
        other.join()
    assert [arguments.exc_type for arguments in printed] == [ZeroDivisionError]


def test_without_the_package_nothing_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(TrainingError, match="the curves need the package tensorboard; run: pip install tensorboard"):
        train(settings(tmp_path / "out", tensorboard=True))
    assert not (tmp_path / "out").exists()


def test_recording_changes_nothing_and_is_kept(tmp_path: Path) -> None:
    train(settings(tmp_path / "plain"))
    train(settings(tmp_path / "recorded", record=True, record_every=3))
    assert_same_weights(tmp_path / "plain", tmp_path / "recorded")
    assert (tmp_path / "plain" / "train.jsonl").read_bytes() == (tmp_path / "recorded" / "train.jsonl").read_bytes()
    assert not (tmp_path / "plain" / "record.json").exists()
    values = json.loads((tmp_path / "recorded" / "record.json").read_text())
    assert values == load_checkpoint(tmp_path / "recorded" / "checkpoint.pt").record
    assert len(recorder.Record.from_dict(values).entries) > 4
    assert (tmp_path / "recorded" / "record.png").read_bytes().startswith(b"\x89PNG")


IN_A_NEW_PROCESS = """
import sys
from pathlib import Path
from halfserve.amp_core.training.train import train
from tests.amp_core.training.runs import settings

for name, record in (("first", True), ("second", True), ("unrecorded", False)):
    train(settings(Path(sys.argv[1], name), epochs=1, record=record, record_every=5))
"""


@pytest.mark.long
def test_what_is_imported_for_it_draws_nothing(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", IN_A_NEW_PROCESS, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert_same_run(tmp_path / "first", tmp_path / "second")
    assert_same_run(tmp_path / "first", tmp_path / "unrecorded")


@pytest.mark.long
@pytest.mark.parametrize(
    ("killed_at", "checkpoint_every"), [(12, 5), (14, 6)], ids=["between recorded steps", "with a recorded step"]
)
def test_a_resumed_run_has_the_whole_record(tmp_path: Path, killed_at: int, checkpoint_every: int) -> None:
    train(settings(tmp_path / "whole", record=True, record_every=3))
    run = settings(tmp_path / "resumed", record=True, record_every=3, checkpoint_every=checkpoint_every)
    killed_in(run, killed_at)
    train(run, resume=True)
    assert (tmp_path / "whole" / "record.json").read_bytes() == (tmp_path / "resumed" / "record.json").read_bytes()


@pytest.mark.parametrize("stale", [None, b"{}"])
def test_a_run_that_was_stopped_before_its_record_gets_it_when_resumed(tmp_path: Path, stale: bytes | None) -> None:
    train(settings(tmp_path, record=True, record_every=3))
    files = [tmp_path / name for name in ("record.json", "record.png")]
    before = [file.read_bytes() for file in files]
    for file in files:
        file.unlink()
        if stale is not None:
            file.write_bytes(stale)  # of an earlier run in this folder
    train(settings(tmp_path, record=True, record_every=3), resume=True)
    assert [file.read_bytes() for file in files] == before


@pytest.mark.long  # as a process that trains: 3 to 4 seconds
def test_people_see_a_table(tmp_path: Path) -> None:
    ended = Halfserve(
        tmp_path / "process", command(tmp_path / "out", "--epochs", "1", "--record", "--record-every", "1")
    ).ended()
    assert ended.code == 0
    assert "Linear" in ended.out or "addmm" in ended.out or "linear" in ended.out


def test_weights_go_out_as_safetensors_and_in_again(tmp_path: Path) -> None:
    train(settings(tmp_path / "one", epochs=2))
    file = tmp_path / "one" / "model.safetensors"
    trained = load_checkpoint(tmp_path / "one" / "checkpoint.pt").weights
    written = load_file(file)
    assert written.keys() == trained.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in trained.items())

    train(settings(tmp_path / "two", epochs=1, learning_rate=1e-12, weights=file, seed=7))
    begun = load_checkpoint(tmp_path / "two" / "checkpoint.pt").weights
    for name in (name for name in begun if name.endswith((".weight", ".bias"))):
        torch.testing.assert_close(begun[name], trained[name], msg=name)


def test_weights_of_another_model_change_nothing(tmp_path: Path) -> None:
    save_file({"other": torch.ones(1)}, tmp_path / "w.safetensors")
    with pytest.raises(WeightsError, match=r"w.safetensors do not fit the \w+: \d+ of the module's tensors are missing"):
        train(settings(tmp_path / "run", weights=tmp_path / "w.safetensors"))
    assert not (tmp_path / "run").exists()


def test_a_run_that_was_killed_has_no_weights_of_the_one_before(tmp_path: Path) -> None:
    train(settings(tmp_path, epochs=1))
    before = (tmp_path / "model.safetensors").read_bytes()
    killed_in(settings(tmp_path, seed=1), step=2)
    assert not (tmp_path / "model.safetensors").exists()
    assert (tmp_path / "model.previous.safetensors").read_bytes() == before


def test_weights_in_the_runs_own_folder_are_kept(tmp_path: Path) -> None:
    train(settings(tmp_path / "one", epochs=1))
    given = (tmp_path / "one" / "model.safetensors").rename(tmp_path / "model.safetensors")
    content = given.read_bytes()
    train(settings(tmp_path, epochs=1, weights=given))
    assert given.read_bytes() != content
    assert (tmp_path / "model.previous.safetensors").read_bytes() == content
