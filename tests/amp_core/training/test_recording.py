"""`--record`: what ran in which dtype and range, kept with the run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from amp_core import recorder
from amp_core.checkpoint import load_checkpoint
from amp_core.training.train import train
from tests.amp_core.training.runs import Halfserve, assert_same_weights, command, killed_in, settings

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


def test_a_resumed_run_has_the_whole_record(tmp_path: Path) -> None:
    train(settings(tmp_path / "whole", record_every=3))
    run = settings(tmp_path / "resumed", record_every=3, checkpoint_every=5)
    killed_in(run, 12)
    train(run, resume=True)
    assert (tmp_path / "whole" / "record.json").read_bytes() == (tmp_path / "resumed" / "record.json").read_bytes()


def test_people_see_a_table(tmp_path: Path) -> None:
    ended = Halfserve(
        tmp_path / "process", command(tmp_path / "out", "--epochs", "1", "--record", "--record-every", "1")
    ).ended()
    assert ended.code == 0
    assert "Linear" in ended.out or "addmm" in ended.out or "linear" in ended.out
