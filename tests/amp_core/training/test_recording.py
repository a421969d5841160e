"""`--record`: what ran in which dtype and range, kept with the run."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from amp_core import recorder
from amp_core.checkpoint import load_checkpoint
from amp_core.training.train import train
from tests.amp_core.training.runs import Halfserve, assert_same_run, assert_same_weights, command, killed_in, settings

if TYPE_CHECKING:
    from pathlib import Path


def test_recording_changes_nothing_and_is_kept(tmp_path: Path) -> None:
    train(settings(tmp_path / "plain"))
    train(settings(tmp_path / "recorded", record_every=3))
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
from amp_core.training.train import train
from tests.amp_core.training.runs import settings

for name, every in (("first", 5), ("second", 5), ("unrecorded", 0)):
    train(settings(Path(sys.argv[1], name), epochs=1, record_every=every))
"""


def test_what_is_imported_for_it_draws_nothing(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", IN_A_NEW_PROCESS, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert_same_run(tmp_path / "first", tmp_path / "second")
    assert_same_run(tmp_path / "first", tmp_path / "unrecorded")


@pytest.mark.parametrize(
    ("killed_at", "checkpoint_every"), [(12, 5), (14, 6)], ids=["between recorded steps", "with a recorded step"]
)
def test_a_resumed_run_has_the_whole_record(tmp_path: Path, killed_at: int, checkpoint_every: int) -> None:
    train(settings(tmp_path / "whole", record_every=3))
    run = settings(tmp_path / "resumed", record_every=3, checkpoint_every=checkpoint_every)
    killed_in(run, killed_at)
    train(run, resume=True)
    assert (tmp_path / "whole" / "record.json").read_bytes() == (tmp_path / "resumed" / "record.json").read_bytes()


@pytest.mark.parametrize("stale", [None, b"{}"])
def test_a_run_that_was_stopped_before_its_record_gets_it_when_resumed(tmp_path: Path, stale: bytes | None) -> None:
    train(settings(tmp_path, record_every=3))
    files = [tmp_path / name for name in ("record.json", "record.png")]
    before = [file.read_bytes() for file in files]
    for file in files:
        file.unlink()
        if stale is not None:
            file.write_bytes(stale)  # of an earlier run in this folder
    train(settings(tmp_path, record_every=3), resume=True)
    assert [file.read_bytes() for file in files] == before


def test_people_see_a_table(tmp_path: Path) -> None:
    ended = Halfserve(
        tmp_path / "process", command(tmp_path / "out", "--epochs", "1", "--record", "--record-every", "1")
    ).ended()
    assert ended.code == 0
    assert "Linear" in ended.out or "addmm" in ended.out or "linear" in ended.out
