"""A data set as a training loop sees it: batches on the device, the same ones whatever happened before."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from types import TracebackType
from typing import Any, Self

import torch
from torch.utils.data import Dataset, IterableDataset

from amp_core.data.errors import DataError
from amp_core.data.indexed_source import IndexedSource
from amp_core.data.loader import Loader
from amp_core.data.pairs import to_device
from amp_core.data.plans import Plan, indexed_plans, stream_plans
from amp_core.data.source import Source
from amp_core.data.split import Split
from amp_core.data.stream_source import StreamSource


class Batches:
    """One data set, seen by one rank.

    **Order.** An epoch's batches depend on the seed, the epoch, the rank and the number of ranks alone: not on what was drawn
    before, nor on the number of workers. That holds for the random numbers too which items draw (augmentation) from torch's
    CPU generator, from numpy's or from Python's shared ones; the process's own state of these is left as it was. A data set
    that keeps a generator of its own is beyond this.

    **Ranks.** In training (`shuffle=True`) all ranks have equally many batches, and each item goes to one rank at most; what
    is left out (see `drop_last`) differs from epoch to epoch. In evaluation each item comes exactly once over all ranks,
    nothing is padded or repeated, so a rank may have one batch more than another.

    **Streams.** An IterableDataset keeps its own order, even with `shuffle=True`. Every worker of every rank reads it from the
    start and keeps its own batches, so reading should be cheap and decoding left to `collate_fn`; a stream that gives each
    rank and worker its own samples (webdataset's pipelines; others say `splits_itself = True`) is left to do so, and then the
    order depends on the number of workers. If ranks may have different numbers of batches, `same_on_all_ranks` is false:
    go through them by `until_one_ends`.

    **Hooks.** `set_epoch(epoch)` of a data set is called, in each worker, before its first item of an epoch;
    `collate_fn(items)` replaces the stacking of items to a pair (inputs, targets); `__getitems__(indices)` fetches a batch at
    once;
    `epoch_order(generator)` replaces the random order.

    Workers start with the first epoch, serve the following ones too, and end by `close`, at the end of a `with`, when an epoch
    is left early, or with this object.

    Args:
        dataset: Of pairs (input, target): tensors or numbers, or tuples, lists and dicts of them.
        batch_size: Items per rank.
        seed: From 0 to 2**63 - 1.
        device: Where the batches go; to CUDA through pinned memory.
        shuffle: Whether this is for training.
        drop_last: Whether to leave out the last items, fewer than a full batch for each rank. None: in training, if there is
            another batch (one of a single item would break BatchNorm); not in evaluation.
        workers: Processes that make the batches; 0 makes them here.
        rank: Which one this is, from 0.
        world_size: How many ranks share the data set.

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
        self._source: Source = self._stream or IndexedSource(dataset, seed=seed, rank=rank)
        if self._stream is None:
            self._split.require_enough(_length(dataset), self._source.name)
        self._idle: list[Loader] = []

    @property
    def same_on_all_ranks(self) -> bool:
        """Whether all ranks have equally many batches; if not, and they work in step, use `until_one_ends`."""
        return self._split.world_size == 1 or (self._stream is None and self._shuffle)

    def batches_per_epoch(self) -> int | None:
        """How many batches this rank has in every epoch; None if only the end of the stream will tell."""
        return None if self._stream is not None else self._split.batches(len(self._dataset))

    def epoch(self, epoch: int, *, skip: int = 0) -> Iterator[tuple[Any, Any]]:
        """Go through the data set once.

        Args:
            epoch: From 0.
            skip: How many batches to leave out at the start: those that follow are the ones which the whole epoch has there.
                Skipped items of a data set with a length are not loaded; a stream is read up to there.

        Yields:
            Pairs (inputs, targets) on the device.

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
            self._idle.pop() if self._idle else Loader(self._source, workers=self._workers, pin=self._device.type == "cuda")
        )
        try:
            for inputs, targets in self._made(loader, epoch, skip):
                yield to_device(inputs, self._device), to_device(targets, self._device)
        except BaseException:  # also GeneratorExit: the consumer stopped early, and may never come back
            loader.close()
            raise
        self._idle.append(loader)

    def _made(self, loader: Loader, epoch: int, skip: int) -> Iterator[tuple[Any, Any]]:
        if self._stream is None:
            plans: Iterator[Plan] = indexed_plans(
                self._dataset, self._split, seed=self._seed, epoch=epoch, skip=skip, shuffle=self._shuffle
            )
            return loader.run(plans)
        return self._streamed(loader, self._stream.whole, epoch, skip)

    def _streamed(self, loader: Loader, whole: bool, epoch: int, skip: int) -> Iterator[tuple[Any, Any]]:
        # Which worker makes which batch of a stream that splits itself depends on when the others end: go through them all.
        made = loader.run(stream_plans(epoch, skip=skip if whole else 0))
        if not whole and len(list(islice(made, skip))) < skip:
            raise DataError(f"the stream {self._source.name} ended before the {skip} batches to skip; has the data changed?")
        delivered = skip
        for delivered, batch in enumerate(made, start=skip + 1):  # noqa: B007  (counted for what follows)
            yield batch
        if not whole and self._shuffle and not delivered:
            raise DataError(f"the stream {self._source.name} gave rank {self._split.rank} no items; expected at least one")

    def close(self) -> None:
        """End the workers that wait for another epoch."""
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
