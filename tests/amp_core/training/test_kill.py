"""A run that SIGKILL ends, at any moment and as often as you like, goes on as if nothing had been."""

from __future__ import annotations

import io
import os
import random
import subprocess
import sys
from contextlib import closing
from typing import IO, TYPE_CHECKING

import pytest

from halfserve.amp_core.checkpoint import load_checkpoint
from tests.amp_core.tiny_task import ANNOUNCEMENT
from tests.amp_core.training.runs import Halfserve, assert_same_run, command, log, together

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


OPTIONS = ("--epochs", "4", "--batch-size", "16", "--accumulate", "2", "--json")


class ForwardPasses:
    """What the announcing models tell of; as a pipe holds one announcement, they are at most one ahead of who listens."""

    def __init__(self, folder: Path) -> None:
        self._pipe = folder / "pipe"
        os.mkfifo(self._pipe)
        self._open_end: IO[bytes] = io.BytesIO()
        self.environment = {"ANNOUNCE": str(self._pipe)}

    def wait_for(self, count: int) -> bool:
        """Wait until the process that was just started has made so many; False if it ended before."""
        self.close()
        self._open_end = self._pipe.open("rb", buffering=0)  # waits until the process has built its model
        left = count * ANNOUNCEMENT
        while left and (told := self._open_end.read(min(left, ANNOUNCEMENT))):
            left -= len(told)
        return left == 0

    def close(self) -> None:
        self._open_end.close()


@pytest.fixture
def passes(tmp_path: Path) -> Iterator[ForwardPasses]:
    with closing(ForwardPasses(tmp_path)) as told:
        yield told


def whole(folder: Path, *more: str, model: str = "Announcing") -> Path:
    ended = Halfserve(folder / "process", command(folder / "out", *OPTIONS, *more, model=model)).ended()
    assert (ended.code, ended.err) == (0, "")
    return folder / "out"


@pytest.mark.long
@pytest.mark.parametrize(
    ("passes_and_seed", "more"),
    [
        ((range(8, 16), 3), ("--workers", "2")),
        ((range(1, 9), 1), ()),
        ((range(3, 14), 2), ("--tensorboard",)),
    ],
)
def test_killed_again_and_again_at_random_moments(
    tmp_path: Path, passes_and_seed: tuple[range, int], more: tuple[str, ...], passes: ForwardPasses
) -> None:
    kills, every = 0, ("--checkpoint-every", "1")
    words = command(tmp_path / "killed", *OPTIONS, *every, *more, "--resume", model="Announcing")
    moments, seed = passes_and_seed
    for moment in random.Random(seed).choices(moments, k=64):  # noqa: S311  (no secret)
        run = Halfserve(tmp_path / "process", words, passes.environment)
        if not passes.wait_for(moment):
            break
        run.kill()
        kills += 1
    assert run.ended().code == 0
    assert kills >= 1
    assert_same_run(whole(tmp_path / "whole"), tmp_path / "killed")


def changed(out: Path) -> int:
    checkpoint = out / "checkpoint.pt"
    return checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0


@pytest.mark.long
def test_killed_while_it_writes_a_checkpoint(tmp_path: Path, passes: ForwardPasses) -> None:
    out, torn = tmp_path / "killed", 0
    words = command(out, *OPTIONS, "--checkpoint-every", "1", "--resume", model="announcing_bulky")
    while torn < 2:
        run = Halfserve(tmp_path / "process", words, passes.environment)
        assert passes.wait_for(3), "the run ended without being caught writing"
        before = changed(out)
        while not list(out.glob(".checkpoint.pt.*.tmp")) and changed(out) == before:
            assert run.process.is_alive()
        run.kill()
        torn += bool(list(out.glob(".checkpoint.pt.*.tmp")))
        if (out / "checkpoint.pt").exists():
            load_checkpoint(out / "checkpoint.pt")
    ended = Halfserve(tmp_path / "process", words).ended()
    assert (ended.code, ended.err) == (0, "")
    assert not list(out.glob(".*.tmp"))
    assert_same_run(whole(tmp_path / "whole", model="announcing_bulky"), out)


@pytest.mark.long
def test_a_new_run_killed_before_its_first_checkpoint_does_not_pass_for_the_old_one(
    tmp_path: Path, passes: ForwardPasses
) -> None:
    out = tmp_path / "out"
    other = Halfserve(tmp_path / "process", command(out, *OPTIONS, "--seed", "5", model="Announcing")).ended()
    assert other.code == 0
    before = (out / "checkpoint.pt").read_bytes()
    run = Halfserve(tmp_path / "process", command(out, *OPTIONS, model="Announcing"), passes.environment)
    assert passes.wait_for(5)
    run.kill()
    assert (out / "checkpoint.previous.pt").read_bytes() == before
    assert Halfserve(tmp_path / "process", command(out, *OPTIONS, "--resume", model="Announcing")).ended().code == 0
    assert_same_run(whole(tmp_path / "whole"), out)


@pytest.mark.long
def test_the_command_itself_killed(tmp_path: Path, passes: ForwardPasses) -> None:
    out = tmp_path / "out"
    words = command(out, *OPTIONS, "--checkpoint-every", "3", "--resume", model="Announcing")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.Popen([sys.executable, "-m", "halfserve", *words], env=environment | passes.environment)
    assert passes.wait_for(14)
    run.kill()
    assert run.wait() == -9
    assert load_checkpoint(out / "checkpoint.pt").step == 6
    assert '"steps": 16' in Halfserve(tmp_path / "process", words).ended().out
    assert_same_run(whole(tmp_path / "whole"), out)


@pytest.mark.long
def test_two_processes_killed(tmp_path: Path, passes: ForwardPasses) -> None:
    words = command(tmp_path / "whole", *OPTIONS, model="Announcing")
    assert [run.ended().code for run in together(tmp_path / "a", words)] == [0, 0]
    words = command(tmp_path / "killed", *OPTIONS, "--checkpoint-every", "1", "--resume", model="Announcing")
    runs = together(tmp_path / "b", words, passes.environment)
    assert passes.wait_for(18)
    for run in runs:
        run.kill()
    stopped_at = log(tmp_path / "killed")[-1]
    assert stopped_at["epoch"] < 4
    assert [run.ended().code for run in together(tmp_path / "b", words)] == [0, 0]
    assert len(load_checkpoint(tmp_path / "killed" / "checkpoint.pt").other_ranks) == 1
    assert_same_run(tmp_path / "whole", tmp_path / "killed")
