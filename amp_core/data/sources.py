"""Data sets as sources of whole batches: with a length, or streams."""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.utils.data._utils.worker as torch_worker
from torch import Tensor
from torch.utils.data import Dataset, default_collate, get_worker_info

from halfserve.amp_core.data.data_errors import DataError, no_shared_memory
from halfserve.amp_core.data.split import BatchPlan, Split
from halfserve.amp_core.factory import one_line
from halfserve.amp_core.random_state import IsolatedRandom, Purpose

_EXPECTED = "the data's items must be pairs (input, target) of tensors or numbers"


def make_batch(items: list[Any], collate: Callable[[list[Any]], Any] | None, name: str) -> tuple[Any, Any]:
    """Collate items to a batch: (inputs, targets), each a tensor or tuples, lists and dicts of tensors.

    Without a data set's own `collate` the items are pairs, whose tensors and numbers are stacked, also in tuples, lists and
    dicts. `name` is the data set's, for messages.

    Raises:
        DataError: If the items are no pairs, cannot be stacked, or contain anything but tensors and numbers.
    """
    if collate is None:
        for item in items:
            _require_pair(item, name)
    try:
        batch = (collate or default_collate)(items)
    except Exception as error:
        raise no_shared_memory(error, name) or DataError(
            f"the items of {name} do not make a batch, {one_line(error)}; expected the same shapes in all"
        ) from error
    _require_pair(batch, name)
    inputs, targets = batch
    _require_tensors(inputs, name)
    _require_tensors(targets, name)
    return inputs, targets


def _require_pair(value: Any, name: str) -> None:
    if not isinstance(value, (tuple, list)):
        raise DataError(f"{_EXPECTED}, but {name} gives {type(value).__name__}")
    if len(value) != 2:
        raise DataError(f"{_EXPECTED}, but {name} gives {len(value)} things at a time")


def _require_tensors(value: Any, name: str) -> None:
    if isinstance(value, Tensor):
        return
    if isinstance(value, (tuple, list)):
        parts: list[Any] = list(value)
    elif isinstance(value, Mapping):
        parts = list(value.values())
    else:
        raise DataError(f"{_EXPECTED}, but {name} has {type(value).__name__} among them")
    for part in parts:
        _require_tensors(part, name)


def share(value: Any, name: str) -> None:
    """Move all tensors in tuples, lists and dicts to shared memory.

    A worker's queue would do so in a thread of its own, which only prints errors and leaves the main process waiting.

    Raises:
        DataError: If there is no room.
    """
    if isinstance(value, Tensor):
        if value.layout is torch.strided:
            try:
                value.share_memory_()  # type: ignore[no-untyped-call]  # (torch leaves it without types)
            except RuntimeError as error:
                raise no_shared_memory(error, name) or error from error
        return
    for part in value.values() if isinstance(value, Mapping) else value:
        share(part, name)


def to_device(value: Any, device: torch.device) -> Any:
    """Move all tensors in tuples, lists and dicts, without waiting for copies from pinned memory."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, tuple):
        moved = [to_device(part, device) for part in value]
        return type(value)(*moved) if hasattr(value, "_fields") else tuple(moved)
    if isinstance(value, list):
        return [to_device(part, device) for part in value]
    return {key: to_device(part, device) for key, part in value.items()}


@dataclass(frozen=True)
class StreamEnd:
    """Marks a batch number beyond the end of the stream."""


@dataclass(frozen=True)
class BatchFailure:
    """A DataError on its way out of a worker, because torch would replace an exception's text by a traceback."""

    message: str
    traceback: str


class BatchSource(Dataset[Any], ABC):
    """The data set that a DataLoader sees: its indices are plans, its items whole batches."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset
        self._told_epoch: int | None = None

    @property
    def name(self) -> str:
        return type(self.dataset).__name__

    @property
    def _collate(self) -> Any:
        return getattr(self.dataset, "collate_fn", None)

    def __getitem__(self, plan: BatchPlan) -> tuple[Any, Any] | StreamEnd | BatchFailure:
        try:
            made = self._make(plan)
            if get_worker_info() is not None and not isinstance(made, StreamEnd):
                share(made, self.name)
            return made
        except DataError as error:
            if get_worker_info() is None:
                raise
            return BatchFailure(str(error), "".join(traceback.format_exception(error)))

    @abstractmethod
    def _make(self, plan: BatchPlan) -> tuple[Any, Any] | StreamEnd: ...

    def _tell_epoch(self, epoch: int) -> None:
        # In the process that makes the batch: a worker has its own copy of the data set.
        if epoch != self._told_epoch:
            set_epoch = getattr(self.dataset, "set_epoch", None)
            if set_epoch is not None:
                try:
                    set_epoch(epoch)
                except DataError:
                    raise
                except Exception as error:
                    raise DataError(f"set_epoch({epoch}) of the data set {self.name} raised {one_line(error)}") from error
            self._told_epoch = epoch


class IndexedSource(BatchSource):
    """Makes each batch of a data set with a length from its plan alone, the same in any worker and after any other batch.

    The random numbers that items draw are seeded once per batch, by the seed of the run, the epoch, the batch's number and the
    rank: one process makes the whole batch, so its items always draw in the same order. (Seeding each item would cost 80
    microseconds an item, and exclude data sets that fetch a batch at once, by `__getitems__`.)
    """

    def __init__(self, dataset: Dataset[Any], *, seed: int, rank: int) -> None:
        super().__init__(dataset)
        self._seed, self._rank = seed, rank

    def _make(self, plan: BatchPlan) -> tuple[Any, Any]:
        assert plan.items is not None  # noqa: S101  (for the type checker: only a stream's plans have none)
        self._tell_epoch(plan.epoch)
        with IsolatedRandom(Purpose.BATCH, self._seed, plan.epoch, plan.number, self._rank):
            return make_batch(self._fetch(plan.items), self._collate, self.name)

    def _fetch(self, items: list[int]) -> list[Any]:
        dataset: Any = self.dataset
        if hasattr(dataset, "__getitems__"):
            try:
                return list(dataset.__getitems__(items))
            except Exception as error:
                raise self._error(f"the items {_listed(items)}", error) from error
        return [self._item(item) for item in items]

    def _item(self, item: int) -> Any:
        try:
            return self.dataset[item]
        except Exception as error:
            raise self._error(f"item {item}", error) from error

    def _error(self, what: str, error: Exception) -> DataError:
        if isinstance(error, DataError):
            return error
        return DataError(f"{what} of the data set {self.name} cannot be read: {one_line(error)}")


def _listed(items: list[int]) -> str:
    return ", ".join(map(str, items[:4])) + (", ..." if len(items) > 4 else "")


def splits_itself(dataset: Dataset[Any]) -> bool:
    """Return whether a stream gives each rank and each worker samples of its own.

    webdataset's pipelines do; other data sets declare it by an attribute `splits_itself = True`.
    """
    if any(base.__module__.split(".")[0] == "webdataset" for base in type(dataset).__mro__):
        return True
    return bool(getattr(dataset, "splits_itself", False))


class StreamSource(BatchSource):
    """Makes the batches of a stream, in the order of the requests.

    Every worker of every rank reads a stream that does not split itself from start to end, and keeps whole batches: a batch is
    the same in every process, and no sample comes twice. Such a stream sees no worker while it runs, so that one which splits
    itself by `get_worker_info` without declaring it loses nothing. Its random numbers continue from batch to batch, from a seed
    that all ranks and workers share.

    Each worker batches a stream that splits itself on its own, with random numbers of its own.
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

    def _make(self, plan: BatchPlan) -> tuple[Any, Any] | StreamEnd:
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
            return StreamEnd()
        # A random state apart from the stream's own, which must not depend on the worker that collates a batch.
        with IsolatedRandom(Purpose.BATCH, self._seed, plan.epoch, plan.number, self._rank):
            return make_batch(items, self._collate, self.name)

    def _start(self, epoch: int, worker: int) -> _Running:
        reader = () if self.whole else (self._rank, worker)
        random = IsolatedRandom(Purpose.STREAM, self._seed, epoch, *reader, goes_on=True)
        with random, self._view():
            self._tell_epoch(epoch)
            return _Running(self.dataset, epoch, random, self.name)

    def _view(self) -> AbstractContextManager[None]:
        return _as_one_process() if self.whole else nullcontext()


class _Running:
    """A stream that is being read, and the number of rounds read."""

    def __init__(self, dataset: Any, epoch: int, random: IsolatedRandom, name: str) -> None:
        self.epoch, self.random = epoch, random
        self.rounds, self._read = 0, 0
        self._samples: Iterator[Any] = _guarded(dataset, name)

    def next_round(self, split: Split) -> tuple[list[Any], int]:
        """Read one round. Returns this rank's items, and the number of items of all ranks."""
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
