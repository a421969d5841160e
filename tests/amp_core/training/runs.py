"""Training runs of the tiny task: in this process, in one that can be killed, in several that train together."""

from __future__ import annotations

import json
import multiprocessing
import os
import select
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # (torch does not list what it exports)

from halfserve import cli
from halfserve.amp_core.checkpoint import load_checkpoint
from halfserve.amp_core.training.train import Progress, train
from halfserve.amp_core.training.training_settings import TrainingSettings
from tests.amp_core.tiny_task import HERE

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

# Forks of a process that has loaded torch already, and has run nothing: a new one starts within milliseconds.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["halfserve.amp_core.train_command", "torch.utils.tensorboard", "torch._dynamo", HERE])


def settings(out: Path, **changes: Any) -> TrainingSettings:
    values: dict[str, Any] = {"model": f"{HERE}:model", "data": f"{HERE}:data", "out": out, "device": "cpu"}
    return TrainingSettings(**(values | {"epochs": 4, "batch_size": 32} | changes))


def log(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]


def steps(folder: Path) -> list[dict[str, Any]]:
    return [record for record in log(folder) if "step" in record]


def assert_same_weights(a: Path, b: Path) -> None:
    first, second = load_checkpoint(a / "checkpoint.pt"), load_checkpoint(b / "checkpoint.pt")
    for name, value in first.weights.items():
        assert torch.equal(value, second.weights[name]), name


def assert_same_run(a: Path, b: Path) -> None:
    """The same to the last bit: weights, optimizer, random generators and log."""
    assert_same_weights(a, b)
    first, second = load_checkpoint(a / "checkpoint.pt"), load_checkpoint(b / "checkpoint.pt")
    for name in ("optimizer", "scheduler", "scaler", "rng", "other_ranks", "metrics", "epoch", "batch", "step"):
        assert same(getattr(first, name), getattr(second, name)), name
    assert (a / "train.jsonl").read_bytes() == (b / "train.jsonl").read_bytes()


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


class KilledError(Exception):
    """In place of a signal: nothing after it runs."""


def killed_in(run: TrainingSettings, step: int, *, resume: bool = False) -> None:
    """Train until a step, and leave everything as it is then."""

    def kill(progress: Progress) -> None:
        if progress.record.step == step:
            raise KilledError

    with pytest.raises(KilledError):
        train(run, resume=resume, on_step=kill)


def command(out: Path, *more: str, model: str = "model", data: str = "data") -> list[str]:
    """The words after `halfserve`; factories are the tiny task's unless a module is named."""
    model, data = (name if ":" in name else f"{HERE}:{name}" for name in (model, data))
    return ["train", model, "--data", data, "--out", str(out), "--device", "cpu", *more]


@dataclass(frozen=True)
class Ended:
    """What is left of a process."""

    code: int | None
    out: str
    err: str


class Halfserve:
    """`halfserve ...` in a process of its own, its output in files in `folder`."""

    def __init__(self, folder: Path, words: list[str], environment: dict[str, str] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._files = folder / "stdout", folder / "stderr"
        self.process: BaseProcess = _FORKS.Process(target=_halfserve, args=(self._files, words, environment or {}))
        self.process.start()

        self.store: TCPStore | None = None  # lives as long as the processes that use it

    def kill(self) -> None:
        if not hasattr(os, "pidfd_open"):
            self.process.kill()
            self.process.join()
            return
        # `join` would wait for the data workers too, which find out by themselves within seconds.
        try:
            process = os.pidfd_open(self.process.pid or 0)
        except ProcessLookupError:  # it noticed that the other one had gone, and has ended by itself
            return
        self.process.kill()
        select.select([process], [], [])
        os.close(process)

    def ended(self) -> Ended:
        self.process.join()
        out, err = (file.read_text() for file in self._files)
        return Ended(self.process.exitcode, out, err)


def together(folder: Path, words: list[str], environment: dict[str, str] | None = None) -> list[Halfserve]:
    """Two processes, each with the environment that torchrun sets, and the store that its agent keeps for them."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)} | (environment or {})
    common |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    runs = [Halfserve(folder / str(rank), words, common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in (0, 1)]
    for run in runs:
        run.store = store
    return runs


def _halfserve(files: tuple[Path, Path], words: list[str], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    # As in a process that a user starts: a fork server's children would hand their own start method on to the data workers.
    multiprocessing.set_start_method(None, force=True)
    torch.set_num_threads(1)
    for stream, file in zip((sys.stdout, sys.stderr), files, strict=True):
        stream.flush()
        with file.open("w") as target:
            os.dup2(target.fileno(), stream.fileno())
    cli.main(words)
