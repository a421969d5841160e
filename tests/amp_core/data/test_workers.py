"""Processes that make batches: the same ones as without, and none that stay."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from halfserve.amp_core.data import DataError
from halfserve.amp_core.data import batches as loader_module
from halfserve.amp_core.data.data_errors import SHARED_MEMORY, WorkerTraceback
from tests.amp_core.data.sets import Numbers, Stream, assert_same, batches, read

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("kind", [Numbers, Stream])
def test_workers_change_nothing(kind: type[Numbers | Stream]) -> None:
    dataset = kind(30)
    with batches(dataset, workers=2) as loader:
        for epoch, skip in ((0, 0), (1, 3), (0, 1)):
            assert_same(list(loader.epoch(epoch, skip=skip)), read(dataset, epoch=epoch)[skip:])


class Process(Dataset[tuple[int, int]]):
    """Says who reads it, with how many threads."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, item: int) -> tuple[int, int]:
        return os.getpid(), torch.get_num_threads()


def test_workers_stay_for_the_next_epoch_with_one_thread_each() -> None:
    with batches(Process(), workers=2, size=2) as loader:
        epochs = [torch.cat([torch.stack(pair) for pair in loader.epoch(epoch)], dim=1) for epoch in range(2)]
        children = {child.pid for child in multiprocessing.active_children()}
    assert set(epochs[0][0].tolist()) == set(epochs[1][0].tolist()) == children
    assert set(epochs[0][1].tolist()) == {1}
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("kind", [Numbers, Stream])
def test_workers_end_when_the_consumer_stops_early(kind: type[Numbers | Stream]) -> None:
    loader = batches(kind(40), workers=2)
    epoch = loader.epoch(0)
    next(epoch)
    assert len(multiprocessing.active_children()) == 2
    del epoch
    assert not multiprocessing.active_children()
    assert_same(list(loader.epoch(0)), read(kind(40)))
    del loader
    assert not multiprocessing.active_children()


def test_workers_end_when_the_consumer_raises() -> None:
    def consume() -> None:
        for _ in batches(Numbers(40), workers=2).epoch(0):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        consume()
    assert not multiprocessing.active_children()


class Broken(Numbers):
    def __getitem__(self, item: int) -> tuple[Tensor, int]:
        if item == 17:
            raise KeyError("no such file\nor so")
        return super().__getitem__(item)


class BrokenStream(Stream):
    def __iter__(self):  # type: ignore[no-untyped-def]  # noqa: ANN204  (as its base says)
        for pair in super().__iter__():
            if pair[1] == 17:
                raise OSError("the net is down")
            yield pair


@pytest.mark.parametrize("workers", [0, 2])
def test_an_item_that_cannot_be_read_is_named(workers: int) -> None:
    with pytest.raises(DataError, match=r"^item 17 of the data set Broken cannot be read: KeyError: 'no such file") as caught:
        read(Broken(20), workers=workers)
    assert isinstance(caught.value.__cause__, WorkerTraceback if workers else KeyError)
    if workers:
        assert "in __getitem__" in str(caught.value.__cause__)
    with pytest.raises(DataError, match=r"^item 17 of the data set BrokenStream cannot be read: OSError: the net is down$"):
        read(BrokenStream(20), workers=workers)
    assert not multiprocessing.active_children()


def test_a_batch_that_cannot_be_fetched_is_named() -> None:
    class BrokenBatch(Numbers):
        def __getitems__(self, indices: list[int]) -> list[int]:
            raise OSError(f"{len(indices)} rows are gone")

    with pytest.raises(
        DataError, match=r"^the items 0, 1, 2, 3, ... of the data set BrokenBatch cannot be .* 6 rows are gone$"
    ):
        read(BrokenBatch(6), size=6, shuffle=False)


class NoEpochs(Numbers):
    def set_epoch(self, epoch: int) -> None:
        raise KeyError(f"no list of epoch {epoch}\nanywhere")


class NoEpochsStream(Stream):
    set_epoch = NoEpochs.set_epoch


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [NoEpochs, NoEpochsStream])
def test_a_set_that_cannot_begin_an_epoch_is_named(kind: type[Numbers | Stream], workers: int) -> None:
    with pytest.raises(DataError, match=rf"^set_epoch\(0\) of the data set {kind.__name__} raised KeyError: 'no list [^\n]*$"):
        read(kind(20), workers=workers)


def test_an_order_that_cannot_be_made_is_named() -> None:
    class NoOrder(Numbers):
        def epoch_order(self, generator: torch.Generator) -> Tensor:
            raise OSError(f"{generator.device} has no index")

    with pytest.raises(DataError, match=r"^epoch_order of the data set NoOrder raised OSError: cpu has no index$"):
        read(NoOrder(20))


class Deadly(Numbers):
    def __getitem__(self, item: int) -> tuple[Tensor, int]:
        if item == 17:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(item)


@pytest.mark.long
def test_a_worker_that_is_killed_is_reported_where_its_batch_is_awaited() -> None:
    handler = signal.getsignal(signal.SIGCHLD)
    with pytest.raises(DataError, match=r"a worker process that read the data set Deadly died; .* take fewer workers"):
        read(Deadly(20), workers=2)
    assert signal.getsignal(signal.SIGCHLD) == handler
    assert not multiprocessing.active_children()


class Cramped(Numbers):
    """In a worker there is no room for shared memory, which is files."""

    def __getitem__(self, item: int) -> tuple[Tensor, int]:
        if get_worker_info() is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        return super().__getitem__(item)


class CrampedOwn(Cramped):
    def collate_fn(self, items: list[tuple[Tensor, int]]) -> tuple[Tensor, list[Tensor]]:
        return torch.stack([item[0] for item in items]), [torch.tensor([item[1] for item in items])]


@pytest.mark.parametrize("kind", [Cramped, CrampedOwn])
def test_a_batch_without_room_in_shared_memory_is_an_error_and_not_awaited(kind: type[Cramped]) -> None:
    wanted = rf"^a worker process found no shared memory for a batch of the data set {kind.__name__}, .*; give /dev/shm more"
    with pytest.raises(DataError, match=wanted) as caught:
        read(kind(20), workers=2)
    file = re.search(r"</(torch_\w+)>", str(caught.value))
    assert file is not None
    assert not (SHARED_MEMORY / file[1]).exists()
    assert not multiprocessing.active_children()
    assert len(read(kind(20))) == len(read(Numbers(20)))


def test_workers_that_cannot_be_started_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(multiprocessing, "Lock", refuse)
    wanted = "no worker process could be started to read the data set Numbers: Read-only file system; take fewer workers, or 0"
    with pytest.raises(DataError, match=f"^{wanted} to read it in this process$"):
        read(Numbers(20), workers=2)
    assert_same(read(Numbers(20)), read(Numbers(20)))


def test_a_limit_of_too_few_open_files_is_an_error() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (47, hard))
    try:
        wanted = r"to read the data set Numbers: the limit of open files is 47 \(ulimit -n\), expected 48 or more; take fewer"
        with pytest.raises(DataError, match=wanted):
            read(Numbers(20), workers=2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_parent_that_dies_as_its_worker_begins_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_worker, "ManagerWatchdog", torch_worker.ManagerWatchdog)  # to be put back
    loader_module._end_if_orphaned(os.getppid(), 0)
    assert torch_worker.ManagerWatchdog().is_alive()
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert not torch_worker.ManagerWatchdog().is_alive()


# A suite that was started in the background of a shell without job control has SIGINT ignored, and its processes inherit that.
CONSUMER = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from tests.amp_core.data.sets import Numbers, batches
epoch = batches(Numbers(4000), workers=2).epoch(0)
next(epoch)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.long
@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGINT])
def test_nothing_stays_when_the_main_process_is_killed_or_interrupted(kind: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CONSUMER],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        if kind is signal.SIGINT:
            os.killpg(process.pid, kind)  # as the terminal does
        else:
            process.kill()
        assert process.stdout.read() == b""  # the end comes when the last process that inherited it is gone
    assert process.returncode != 0
