"""Batches of a data set without a length."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any

import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import Dataset, get_worker_info

from amp_core.data.errors import DataError, one_line
from amp_core.data.own_random import OwnRandom, Purpose
from amp_core.data.pairs import make_batch
from amp_core.data.plans import Plan
from amp_core.data.source import End, Source
from amp_core.data.split import Split


def splits_itself(dataset: Dataset[Any]) -> bool:
    """Whether a stream gives each rank and each worker samples of its own.

    webdataset's pipelines do; any other data set says so by an attribute `splits_itself = True`.
    """
    if any(base.__module__.split(".")[0] == "webdataset" for base in type(dataset).__mro__):
        return True
    return bool(getattr(dataset, "splits_itself", False))


class StreamSource(Source):
    """Makes the batches of a stream, in the order in which it is asked for them.

    A stream that does not split itself is read from start to end by every worker of every rank, and each keeps whole batches:
    then a batch is the same whoever makes it, and no sample comes twice. While such a stream runs it sees no worker, so that
    one which splits itself by `get_worker_info` without saying so loses nothing. Its random numbers go on from batch to batch,
    from a seed that all ranks and workers share.

    A stream that splits itself is batched by each worker on its own, with random numbers of the worker's own.

    Args:
        dataset: Iterable, over pairs.
        split: Between the ranks.
        seed: Of the run.
    """

    def __init__(self, dataset: Dataset[Any], split: Split, *, seed: int) -> None:
        super().__init__(dataset)
        self.whole = not splits_itself(dataset)
        self._rank, self._seed = split.rank, seed
        alone = Split(batch_size=split.batch_size, training=split.training, drop_last=split.drop_last)
        self._split = split if self.whole else alone
        self._running: _Running | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_running": None}  # a running stream cannot be sent to a worker, nor need it be

    def _make(self, plan: Plan) -> tuple[Any, Any] | End:
        worker = get_worker_info()
        number = plan.number if self.whole or worker is None else plan.number // worker.num_workers
        running = self._running
        if running is None or running.epoch != plan.epoch or running.rounds > number:
            running = self._running = self._start(plan.epoch, 0 if worker is None else worker.id)
        with running.random, self._view():
            while running.rounds < number:
                running.next_round(self._split)
            items, in_round = running.next_round(self._split)
        if number == 0 and self.whole:
            self._split.require_enough(in_round, self.name)
        if not self._split.uses(number, in_round):
            return End()
        # Apart from the stream's own, which must not depend on which worker put which batch together.
        with OwnRandom(Purpose.BATCH, self._seed, plan.epoch, plan.number, self._rank):
            return make_batch(items, self._collate, self.name)

    def _start(self, epoch: int, worker: int) -> _Running:
        reader = () if self.whole else (self._rank, worker)
        random = OwnRandom(Purpose.STREAM, self._seed, epoch, *reader, goes_on=True)
        with random, self._view():
            self._tell_epoch(epoch)
            return _Running(self.dataset, epoch, random, self.name)

    def _view(self) -> AbstractContextManager[None]:
        return _as_one_process() if self.whole else nullcontext()


class _Running:
    """A stream that is being read, and how far it is."""

    def __init__(self, dataset: Any, epoch: int, random: OwnRandom, name: str) -> None:
        self.epoch, self.random = epoch, random
        self.rounds, self._read = 0, 0
        self._samples: Iterator[Any] = _guarded(dataset, name)

    def next_round(self, split: Split) -> tuple[list[Any], int]:
        """Read on. Returns this rank's items of the round, and how many the round has over all ranks."""
        mine, read = [], 0
        for sample in islice(self._samples, split.round_size):
            if read % split.world_size == split.rank:
                mine.append(sample)
            read += 1
        self.rounds += 1
        return mine, read


def _guarded(dataset: Any, name: str) -> Iterator[Any]:
    read = 0
    try:
        for sample in dataset:
            yield sample
            read += 1
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"item {read} of the data set {name} cannot be read: {one_line(error)}") from error


@contextmanager
def _as_one_process() -> Iterator[None]:
    worker = torch_worker._worker_info  # noqa: SLF001  (torch has no public way to hide it)
    torch_worker._worker_info = None  # noqa: SLF001  (as above)
    try:
        yield
    finally:
        torch_worker._worker_info = worker  # noqa: SLF001  (as above)
