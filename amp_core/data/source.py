"""From a plan to a batch, in whichever process."""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from amp_core.data.errors import DataError, one_line
from amp_core.data.pairs import share
from amp_core.data.plans import Plan


@dataclass(frozen=True)
class End:
    """There is no batch of the number asked for: the stream is over."""


@dataclass(frozen=True)
class Failure:
    """A DataError on its way out of a worker: an exception would arrive with its text replaced by a traceback."""

    message: str
    traceback: str


class Source(Dataset[Any], ABC):
    """What a DataLoader sees instead of the user's data set: its indices are plans, its items whole batches."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset
        self._told_epoch: int | None = None

    @property
    def name(self) -> str:
        """Of the data set, for messages."""
        return type(self.dataset).__name__

    @property
    def _collate(self) -> Any:
        return getattr(self.dataset, "collate_fn", None)

    def __getitem__(self, plan: Plan) -> tuple[Any, Any] | End | Failure:
        try:
            made = self._make(plan)
            if get_worker_info() is not None and not isinstance(made, End):
                share(made, self.name)
            return made
        except DataError as error:
            if get_worker_info() is None:
                raise
            return Failure(str(error), "".join(traceback.format_exception(error)))

    @abstractmethod
    def _make(self, plan: Plan) -> tuple[Any, Any] | End: ...

    def _tell_epoch(self, epoch: int) -> None:
        # Here and not in the main process: a worker has a copy of the data set.
        if epoch != self._told_epoch:
            if hasattr(self.dataset, "set_epoch"):
                try:
                    self.dataset.set_epoch(epoch)
                except DataError:
                    raise
                except Exception as error:
                    raise DataError(f"set_epoch({epoch}) of the data set {self.name} raised {one_line(error)}") from error
            self._told_epoch = epoch
