"""A data set as a training loop sees it: reproducible batches on the device."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Any, Self

import torch
from torch import Generator
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data._utils import worker

from halfserve.amp_core.data.data_errors import DataError, WorkerTraceback
from halfserve.amp_core.data.sources import BatchFailure, BatchSource, IndexedSource, StreamEnd, StreamSource, to_device
from halfserve.amp_core.data.split import BatchPlan, Split, indexed_plans, stream_plans

# Open files of a process with workers: its own, and for each worker its pipes and the waiting batches, one file per tensor. If
# they run out, torch prints a traceback of its incomplete iterator.
FILES, FILES_OF_A_WORKER = 32, 8


class BatchLoader:
    """Turns plans into batches, in this process or in workers of its own, epoch after epoch."""

    def __init__(self, source: BatchSource, *, workers: int, pin: bool) -> None:
        self._plans = _Plans()
        self._workers = workers
        self._name = source.name
        self._running: Any = None
        self._torch: DataLoader[Any] = DataLoader(
            source,
            batch_size=None,
            sampler=self._plans,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=pin,
            collate_fn=_as_it_is,
            worker_init_fn=partial(_end_if_orphaned, os.getpid()),
            generator=Generator(),  # otherwise each epoch would draw from the process's own generator
        )

    def run(self, plans: Iterator[BatchPlan]) -> Iterator[tuple[Any, Any]]:
        """Make the batches of an epoch, in order.

        Raises:
            DataError: If an item cannot be read or batched, or a worker died or could not be started.
        """
        self._plans.now = plans
        try:
            if self._workers:
                _check_open_files(self._workers)
                multiprocessing.Lock()  # where no lock can be made, torch would also complain about its incomplete iterator
            with _no_errors_from_signals():
                self._running = iter(self._torch)
        except OSError as error:
            raise DataError(
                f"no worker process could be started to read the data set {self._name}: {error.strerror or error}; "
                "take fewer workers, or 0 to read it in this process"
            ) from error
        ended = 0
        while ended < max(1, self._workers):  # all workers in a row: the parts of a stream that splits itself end independently
            result = self._next()
            if isinstance(result, BatchFailure):
                raise DataError(result.message) from WorkerTraceback(result.traceback)
            if result is None:
                return
            if isinstance(result, StreamEnd):
                ended += 1
                continue
            ended = 0
            yield result

    def _next(self) -> Any:
        try:
            return next(self._running, None)
        except (RuntimeError, ConnectionError, EOFError) as error:
            if isinstance(error, RuntimeError) and "DataLoader worker" not in str(error):
                raise
            raise DataError(
                f"a worker process that read the data set {self._name} died; if the machine ran out of memory, "
                "take fewer workers or a smaller batch_size"
            ) from error

    def close(self) -> None:
        """End the workers now, not with the last reference to them."""
        running, self._running = self._running, None
        if self._workers and running is not None:
            running._shutdown_workers()  # noqa: SLF001  (torch has no public way)


def _check_open_files(workers: int) -> None:
    try:
        import resource  # noqa: PLC0415  (Windows does not have it)
    except ModuleNotFoundError:
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = FILES + workers * FILES_OF_A_WORKER
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise OSError(errno.EMFILE, f"the limit of open files is {limit} (ulimit -n), expected {needed} or more")


class _Plans:
    """Sampler whose plans are replaced before each epoch, so that the DataLoader and its workers stay."""

    now: Iterator[BatchPlan] = iter(())

    def __iter__(self) -> Iterator[BatchPlan]:
        return self.now


@contextmanager
def _no_errors_from_signals() -> Iterator[None]:
    # With its first worker torch installs a signal handler that raises at any place of the main thread when a worker dies, also
    # inside an optimizer's step. Without the handler the death shows where the worker's batch is awaited.
    number = getattr(signal, "SIGCHLD", None)  # Windows has none, and torch no handler there
    before = None if number is None else signal.getsignal(number)
    try:
        yield
    finally:
        if number is not None and before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(number, before)


def _end_if_orphaned(parent: int, _: int) -> None:
    # torch's worker compares its parent with the parent that it first saw. If the parent was killed before that, the worker
    # would stay forever; so the worker compares with the parent's id from the start.
    if multiprocessing.get_start_method() == "forkserver":  # its workers are children of the server
        return
    if os.getppid() != parent:
        os._exit(1)
    worker.ManagerWatchdog = partial(_Watchdog, parent)  # type: ignore[assignment,misc]  # (called as the class is)


class _Watchdog:
    """torch's watchdog, for a parent whose id is known from the start."""

    def __init__(self, parent: int) -> None:
        self._parent = parent

    def is_alive(self) -> bool:
        return os.getppid() == self._parent


def _as_it_is(value: Any) -> Any:
    return value


class Batches:
    """One data set, as seen by one rank.

    **Order.** An epoch's batches depend on the seed, the epoch, the rank and the number of ranks alone: not on earlier random
    draws, nor on the number of workers. That includes the random numbers that items draw (augmentation) from torch's CPU
    generator, from numpy's or from Python's shared ones; the process's own state of these is restored. A data set with a
    generator of its own is not covered.

    **Ranks.** In training (`shuffle=True`) all ranks have equally many batches, and each item goes to one rank at most; the
    left-out items (see `drop_last`) differ from epoch to epoch. In evaluation each item comes exactly once over all ranks,
    nothing is padded or repeated, so a rank may have one batch more than another.

    **Streams.** An IterableDataset keeps its own order, even with `shuffle=True`. Every worker of every rank reads it from the
    start and keeps its own batches, so reading should be cheap and decoding left to `collate_fn`. A stream that gives each rank
    and worker its own samples (webdataset's pipelines; others declare `splits_itself = True`) is left to do so, and then the
    order depends on the number of workers. If ranks may have different numbers of batches, `same_on_all_ranks` is false:
    iterate by `until_one_ends`.

    **Hooks.** `set_epoch(epoch)` of a data set is called, in each worker, before its first item of an epoch;
    `collate_fn(items)` replaces the stacking of items to a pair (inputs, targets); `__getitems__(indices)` fetches a batch at
    once; `epoch_order(generator)` replaces the random order.

    Workers start with the first epoch, serve the following ones too, and end by `close`, at the end of a `with`, when an epoch
    is left early, or with this object.

    Args:
        dataset: The data set, of pairs (input, target): tensors or numbers, or tuples, lists and dicts of them.
        batch_size: Items per rank.
        seed: Seed of the order and of the items' random numbers, 0 to 2**63 - 1.
        device: The batches' device; batches are copied to CUDA through pinned memory.
        shuffle: Whether this is for training.
        drop_last: Whether to leave out the last items, fewer than a full batch for each rank. None: in training, if there is
            another batch (one of a single item would break BatchNorm); not in evaluation.
        workers: Processes that make the batches; 0 makes them here.
        rank: The number of this process, from 0.
        world_size: The number of ranks that share the data set.

    Raises:
        DataError: If an argument is out of its range, or there are too few items for a batch.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        batch_size: int,
        seed: int,
        device: torch.device,
        shuffle: bool,
        drop_last: bool | None = None,
        workers: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._split = Split(batch_size=batch_size, rank=rank, world_size=world_size, training=shuffle, drop_last=drop_last)
        if workers < 0:
            raise DataError(f"workers must be 0 (none) or above, got {workers}")
        if not 0 <= seed < 2**63:
            raise DataError(f"seed must be between 0 and 2**63 - 1, got {seed}")
        self._dataset: Any = dataset
        self._seed, self._device, self._shuffle, self._workers = seed, device, shuffle, workers
        self._stream = StreamSource(dataset, self._split, seed=seed) if isinstance(dataset, IterableDataset) else None
        self._source: BatchSource = self._stream or IndexedSource(dataset, seed=seed, rank=rank)
        if self._stream is None:
            self._split.require_enough(_length(dataset), self._source.name)
        self._idle: list[BatchLoader] = []

    @property
    def same_on_all_ranks(self) -> bool:
        """Whether all ranks have equally many batches; if not, and they work in step, use `until_one_ends`."""
        return self._split.world_size == 1 or (self._stream is None and self._shuffle)

    def batches_per_epoch(self) -> int | None:
        """Return the number of this rank's batches in every epoch; None for a stream."""
        return None if self._stream is not None else self._split.batches(len(self._dataset))

    def epoch(self, epoch: int, *, skip: int = 0) -> Iterator[tuple[Any, Any]]:
        """Iterate over pairs (inputs, targets) of one epoch, from 0, on the device.

        The first `skip` batches are left out; the following ones are those of the whole epoch. Skipped items of a data set with
        a length are not loaded; a stream is read up to there.

        Raises:
            DataError: At once if the epoch is shorter than `skip`; later if the data cannot be read or batched.
        """
        if epoch < 0 or skip < 0:
            raise DataError(f"epoch and skip must be 0 or above, got {epoch} and {skip}")
        batches = self.batches_per_epoch()
        if batches is not None and skip > batches:
            raise DataError(f"cannot skip {skip} batches of {self._source.name}: an epoch has {batches}; has the data changed?")
        return self._run(epoch, skip)

    def _run(self, epoch: int, skip: int) -> Iterator[tuple[Any, Any]]:
        loader = (
            self._idle.pop()
            if self._idle
            else BatchLoader(self._source, workers=self._workers, pin=self._device.type == "cuda")
        )
        try:
            for inputs, targets in self._made(loader, epoch, skip):
                yield to_device(inputs, self._device), to_device(targets, self._device)
        except BaseException:  # also GeneratorExit: the consumer stopped early, and may never come back
            loader.close()
            raise
        self._idle.append(loader)

    def _made(self, loader: BatchLoader, epoch: int, skip: int) -> Iterator[tuple[Any, Any]]:
        if self._stream is None:
            plans: Iterator[BatchPlan] = indexed_plans(
                self._dataset, self._split, seed=self._seed, epoch=epoch, skip=skip, shuffle=self._shuffle
            )
            return loader.run(plans)
        return self._streamed(loader, self._stream.whole, epoch, skip)

    def _streamed(self, loader: BatchLoader, whole: bool, epoch: int, skip: int) -> Iterator[tuple[Any, Any]]:
        # The worker of each batch of a stream that splits itself depends on when the others end: read all batches up to `skip`.
        made = loader.run(stream_plans(epoch, skip=skip if whole else 0))
        if not whole and len(list(islice(made, skip))) < skip:
            raise DataError(f"the stream {self._source.name} ended before the {skip} batches to skip; has the data changed?")
        delivered = skip
        for delivered, batch in enumerate(made, start=skip + 1):  # noqa: B007  (counted for what follows)
            yield batch
        if not whole and self._shuffle and not delivered:
            raise DataError(f"the stream {self._source.name} gave rank {self._split.rank} no items; expected at least one")

    def close(self) -> None:
        """End the idle workers."""
        while self._idle:
            self._idle.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _length(dataset: Any) -> int:
    try:
        return len(dataset)
    except TypeError as error:
        raise DataError(
            f"{type(dataset).__name__} has neither a length nor is it a torch IterableDataset; "
            "give it __len__ and __getitem__, or derive it from IterableDataset"
        ) from error
