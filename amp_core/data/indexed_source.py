"""Batches of a data set with a length."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from amp_core.data.errors import DataError, one_line
from amp_core.data.own_random import OwnRandom, Purpose
from amp_core.data.pairs import make_batch
from amp_core.data.plans import Plan
from amp_core.data.source import Source


class IndexedSource(Source):
    """Makes each batch from its plan alone, so that it is the same in any worker and after any other batch.

    The random numbers that items draw are seeded once per batch, by the seed of the run, the epoch, the batch's number and the
    rank: a batch is made by one process from start to end, so its items always draw in the same order. (Per item it would
    cost 80 microseconds an item, and shut out data sets that fetch a batch at once, by `__getitems__`.)
    """

    def __init__(self, dataset: Dataset[Any], *, seed: int, rank: int) -> None:
        super().__init__(dataset)
        self._seed, self._rank = seed, rank

    def _make(self, plan: Plan) -> tuple[Any, Any]:
        assert plan.items is not None  # noqa: S101  (for the type checker: only a stream's plans have none)
        self._tell_epoch(plan.epoch)
        with OwnRandom(Purpose.BATCH, self._seed, plan.epoch, plan.number, self._rank):
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
