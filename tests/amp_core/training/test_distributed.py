"""Two processes that train together, over gloo."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from halfserve.amp_core.checkpoint import load_checkpoint
from halfserve.amp_core.training.components import training_device
from halfserve.amp_core.training.distributed import World, joined_world
from halfserve.amp_core.training.training_settings import TrainingError
from tests.amp_core.tiny_task import ANNOUNCEMENT, data
from tests.amp_core.training.runs import Halfserve, command, steps, together

if TYPE_CHECKING:
    from tests.amp_core.training.runs import Ended

OPTIONS = ("--epochs", "3", "--json")
HALVES = (*OPTIONS, "--batch-size", "16")
WHOLES = (*OPTIONS, "--batch-size", "32")


def width_known_later() -> nn.Module:
    return nn.LazyLinear(2)


def width_by_rank() -> nn.Module:
    width = 3 + int(os.environ["RANK"])
    return nn.Sequential(nn.Linear(2, width), nn.Linear(width, 2))


def length_by_rank() -> tuple[Subset[tuple[Tensor, ...]], TensorDataset]:
    """As of a factory that lists a folder which not every machine has in full."""
    train, held_out = data()
    return Subset(train, range(128 - int(os.environ["RANK"]))), held_out


def leaves_with_a_reason() -> None:
    sys.exit("no data at all")


def leaves() -> None:
    sys.exit()


def alone(folder: Path, *options: str, model: str = "plain", data: str = "data") -> Ended:
    return Halfserve(folder / "alone.process", command(folder / "alone", *options, model=model, data=data)).ended()


def both(folder: Path, *options: str, model: str = "plain", data: str = "data") -> list[Ended]:
    words = command(folder / "both", *options, model=model, data=data)
    return [run.ended() for run in together(folder / "both.processes", words)]


def assert_close(folder: Path) -> None:
    first, second = (load_checkpoint(folder / name / "checkpoint.pt") for name in ("alone", "both"))
    torch.testing.assert_close(first.weights, second.weights, rtol=1e-4, atol=1e-6)
    for a, b in zip(steps(folder / "alone"), steps(folder / "both"), strict=True):
        assert a == pytest.approx(b, rel=1e-4)
    assert first.metrics == pytest.approx(second.metrics, rel=1e-5)


@pytest.mark.long
def test_torchrun_trains_as_one_process_with_the_batch_of_both(tmp_path: Path, free_port: int) -> None:
    words = command(tmp_path / "both", *HALVES, "--accumulate", "2", "--dtype", "float32", model="plain")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run([*torchrun, "-m", "halfserve", *words], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("{") == done.stdout.count('"processes": 2') == 1
    assert "Warning" not in done.stderr
    assert alone(tmp_path, *WHOLES, "--accumulate", "2", "--dtype", "float32").code == 0
    assert_close(tmp_path)


@pytest.mark.long
def test_an_overflow_in_one_process_is_skipped_in_both(tmp_path: Path) -> None:
    assert [ended.code for ended in both(tmp_path, *HALVES, data="one_poisoned")] == [0, 0]
    assert alone(tmp_path, *WHOLES, data="one_poisoned").code == 0
    assert [record["step"] for record in steps(tmp_path / "both") if record["skipped"]]
    first, second = (load_checkpoint(tmp_path / name / "checkpoint.pt") for name in ("alone", "both"))
    assert first.scaler == second.scaler
    torch.testing.assert_close(first.weights, second.weights, rtol=1e-2, atol=1e-3)


@pytest.mark.long
def test_streams_are_shared_out_and_end_together(tmp_path: Path) -> None:
    """Of nine batches one process has five and the other four."""
    options = (*OPTIONS, "--batch-size", "15", "--steps-per-epoch", "7")
    ended = both(tmp_path, *options, data="streams")
    assert [run.code for run in ended] == [0, 0]
    assert {record["epoch"] for record in steps(tmp_path / "both")} == {1, 2, 3}
    assert len(steps(tmp_path / "both")) == 12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "broken"}, "the disk has a hole"),
        ({"model": "LostInTheMiddle"}, "training diverged: .* the output of divide"),
        ({"model": "modell"}, "did you mean 'model'"),
        pytest.param(
            {"model": f"{__name__}:width_known_later"},
            "the model cannot be trained in 2 processes: .* uninitialized parameters",
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"model": f"{__name__}:width_by_rank"},
            "the model cannot be trained in 2 processes: RuntimeError",
            marks=pytest.mark.long,
        ),
        (
            {"data": f"{__name__}:length_by_rank"},
            "rank 0 has 128 items to train on and 32 held out, rank 1 has 127 and 32; ret",
        ),
    ],
)
def test_an_error_in_one_process_ends_both_with_one_message(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    ended = both(tmp_path, *HALVES, **changes)
    assert all(run.code in {1, 2} for run in ended)
    said = [run.err for run in ended if run.err]
    assert len(said) == 1
    assert said[0].startswith("halfserve train: ")
    assert said[0].count("\n") == 1
    assert re.search(message, said[0])
    assert not (tmp_path / "both" / "checkpoint.pt").exists()


@pytest.mark.long
@pytest.mark.parametrize(("reason", "code", "said"), [("no data at all", 1, "no data at all\n"), (None, 0, "")])
def test_what_the_users_code_exits_with_is_said(tmp_path: Path, reason: str | None, code: int, said: str) -> None:
    data = f"{__name__}:{leaves_with_a_reason.__name__ if reason else leaves.__name__}"
    ended = both(tmp_path, *HALVES, data=data)
    assert [(run.code, run.err) for run in ended] == [(code, said)] * 2


@pytest.mark.long
def test_resuming_in_another_number_of_processes_is_refused(tmp_path: Path) -> None:
    assert both(tmp_path, *HALVES)[0].code == 0
    ended = Halfserve(tmp_path / "process", command(tmp_path / "both", *HALVES, "--resume", model="plain")).ended()
    assert ended.code == 1
    assert "was trained in 2 processes, this run has 1 process; start it with torchrun --nproc-per-node 2" in ended.err


def test_a_torn_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(TrainingError, match="not WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT; start"), joined_world():
        pass
    monkeypatch.setenv("WORLD_SIZE", "1")
    with joined_world() as world:
        assert world == World()


def test_no_gpu_to_take() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(TrainingError, match="device 'cuda' cannot be used here .*; try 'cpu' or 'auto'"):
        training_device("cuda", World(rank=1, size=2, local_rank=1))


@pytest.mark.gpu
def test_several_processes_take_a_gpu_each() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    assert training_device("cuda", World(rank=0, size=2, local_rank=0)) == torch.device("cuda", 0)
    with pytest.raises(TrainingError, match="2 processes cannot share 'cuda:0'; use 'cuda'"):
        training_device("cuda:0", World(rank=1, size=2, local_rank=1))
    count = torch.cuda.device_count()
    with pytest.raises(TrainingError, match=f"there are {count} GPUs here and more processes than that"):
        training_device("auto", World(rank=count, size=count + 1, local_rank=count))


def test_a_process_that_was_killed_leaves_no_traceback_in_the_other(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    words = command(tmp_path / "out", *HALVES, model="Announcing")
    first, second = together(tmp_path / "processes", words, {"ANNOUNCE": str(pipe)})
    with pipe.open("rb", buffering=0) as told:
        assert told.read(1)
        second.kill()
        while told.read(ANNOUNCEMENT):
            pass
    ended = first.ended()
    assert ended.code == 1
    assert ended.err.startswith("halfserve train: rank 0 lost its connection to another process of the run; was that killed?")
    assert "do not fit together" not in ended.err
    assert ended.err.count("\n") == 1


def fresh_pair(port: int, program: str, *words: str) -> list[subprocess.CompletedProcess[str]]:
    """Two interpreters that have loaded nothing yet, and end as those of users do."""
    common = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    pair = [
        subprocess.Popen(
            [sys.executable, "-c", program, *words],
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    ended = [process.communicate(timeout=500) for process in pair]
    return [subprocess.CompletedProcess([], run.returncode, *said) for run, said in zip(pair, ended, strict=True)]


HALFSERVE = """
import atexit, pathlib, sys
from halfserve.cli import main
def ends(): print("the interpreter ends, and gloo has", [n for n in names() if "gloo" in n])
def names(): return [(thread / "comm").read_text().strip() for thread in pathlib.Path("/proc/self/task").iterdir()]
atexit.register(ends)
main(sys.argv[1:])
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's list of a process's threads")
def test_gloo_has_ended_when_the_interpreter_ends(tmp_path: Path, free_port: int) -> None:
    """One of its threads that lets go of a tensor meanwhile takes the process down, once in some thousand runs."""
    words = command(tmp_path / "out", "--epochs", "1", "--json", model="plain")
    ended = fresh_pair(free_port, HALFSERVE, *words)
    assert [run.returncode for run in ended] == [0, 0], ended
    assert all(run.stdout.endswith("the interpreter ends, and gloo has []\n") for run in ended), ended


@pytest.mark.long
def test_after_an_error_nobody_waits_for_gloo_and_the_interpreter_does_not_end(tmp_path: Path, free_port: int) -> None:
    words = command(tmp_path / "out", "--epochs", "1", "--json", model="plain", data="broken")
    ended = fresh_pair(free_port, HALFSERVE, *words)
    assert [run.returncode for run in ended] == [1, 1], ended
    assert "".join(run.stderr for run in ended).count("the disk has a hole") == 1
    assert [run.stdout for run in ended] == ["", ""]
