"""A training run: its state, its steps, and how it is saved to and restored from a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import islice
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import nn
from torch.utils.data import Dataset

from halfserve.amp_core.autocast.autocast import autocast
from halfserve.amp_core.calling import described_call
from halfserve.amp_core.checkpoint import Checkpoint, build_data, require_readable
from halfserve.amp_core.data import Batches, DataError, until_one_ends
from halfserve.amp_core.factory import one_line, place_of
from halfserve.amp_core.grad_scaler.grad_scaler import GradScaler
from halfserve.amp_core.random_state import random_state, seed_everything
from halfserve.amp_core.recorder import Recorder
from halfserve.amp_core.training.components import (
    build_model,
    build_optimizer,
    in_parallel,
    load_loss,
    require_same_data,
    restore,
    restore_random_state,
    warmup_and_cosine,
)
from halfserve.amp_core.training.distributed import World, is_broken_connection
from halfserve.amp_core.training.divergence import DivergenceWatch, is_bad
from halfserve.amp_core.training.step import Batch, RunningStatistics, StepRecord, Training, evaluate, train_step
from halfserve.amp_core.training.training_settings import DTYPES, TrainingError, TrainingSettings
from halfserve.amp_core.weights.state_dicts import load_into, load_weights


@contextmanager
def first_error_in_one_line(
    message: str, *, is_first: bool, model: nn.Module | None = None, inputs: Any = None
) -> Iterator[None]:
    """Report in one line, which begins with `message`, the first exception of the user's model, data and functions together.

    Later exceptions are bugs, and keep their traceback. With a model, its `forward` and its inputs are described, too.

    Raises:
        TrainingError: In place of the block's exception, if `is_first`.
    """
    try:
        yield
    except Exception as error:
        if not is_first or isinstance(error, (TrainingError, DataError)) or is_broken_connection(error):
            raise
        call = "" if model is None else described_call(model, inputs)
        raise TrainingError(f"{message} raised {one_line(error)}{place_of(error)}{call}") from error


class Recording:
    """Records the operations of a run's steps if that is wanted, else does nothing.

    Raises:
        TrainingError: If `before` is no record.
    """

    def __init__(self, model: nn.Module, *, every: int, before: dict[str, Any]) -> None:
        self._before = before
        self._recorder: Recorder | None = None
        if every or before:
            recorder = Recorder(model, every=max(1, every))
            try:
                if before:  # loaded also without recording: the run's end writes it again
                    recorder.load_dict(before)
            except ValueError as error:
                raise TrainingError(f"cannot go on with the checkpoint's record: {error}") from error
            self._recorder = recorder if every else None

    def of_step(self, step: int) -> Callable[[float], AbstractContextManager[None]]:
        """Return the function from a step's loss scale to the context of its forward, loss and backward."""
        return partial(self._around, step)

    def _around(self, step: int, scale: float) -> AbstractContextManager[None]:
        return nullcontext() if self._recorder is None else self._recorder.step(step, scale=scale)

    def to_dict(self) -> dict[str, Any]:
        """Return the record, for a checkpoint; empty if nothing was ever recorded."""
        return self._before if self._recorder is None else self._recorder.to_dict()


Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The end of an epoch."""

    epoch: int  # counted from 1
    step: int  # the number of attempted steps until then
    metrics: dict[str, float]  # `loss` on held-out data, and `accuracy` for a classifier


class TrainingRun:
    """The state that moves from step to step; to be used in a `with`, which ends the data's workers.

    Raises:
        FactoryError: If the model, data, loss or optimizer cannot be imported or built.
        CheckpointError: If the data is no pair of data sets, or `before` does not fit the model.
        DataError: If the data cannot be split into batches.
        WeightsError: If the weights to start from cannot be read, or are not the model's.
        TrainingError: If the model cannot be trained, or the length of the run is not known.
    """

    def __init__(self, settings: TrainingSettings, device: torch.device, world: World, before: Checkpoint | None) -> None:
        self.settings, self.device, self.world = settings, device, world
        self.epochs_done = self._epochs_before = before.epoch if before else 0
        self.steps_done = self._steps_before = before.step if before else 0
        self.batches_done = before.batch if before else 0
        self.metrics = dict(before.metrics) if before else {}
        train_set, held_out_set = build_data(settings.data, held_out_indexable=False)
        require_same_data((train_set, held_out_set), world)
        self._train_batches = self._batches(train_set, shuffle=True)
        self._held_out_batches = self._batches(held_out_set, shuffle=False)
        self.steps_in_total = settings.epochs * self._steps_per_epoch()
        self.training = self._training(before)
        self._watch = DivergenceWatch(self.training, settings.patience)
        self._statistics = RunningStatistics(self.training.model)
        every = settings.record_every if settings.record and world.is_first else 0
        self._recording = Recording(self.training.model, every=every, before=before.record if before else {})
        self._set_random_state(before)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._train_batches.close()
        self._held_out_batches.close()

    @property
    def is_complete(self) -> bool:
        return self.epochs_done >= self.settings.epochs

    @property
    def skipped_steps(self) -> int:
        """The number of skipped steps: the scheduler has counted the others."""
        return self.steps_done - int(self.training.scheduler.last_epoch)

    @property
    def record(self) -> dict[str, Any]:
        """The operations that this process has recorded; empty if nothing was ever recorded."""
        return self._recording.to_dict()

    def _training(self, before: Checkpoint | None) -> Training:
        settings = self.settings
        model = build_model(settings.model)
        if settings.weights is not None and before is None:
            load_into(model, load_weights(settings.weights), str(settings.weights))
        model = model.to(self.device)
        optimizer = build_optimizer(settings.optimizer, model, settings.learning_rate)
        share = partial(warmup_and_cosine, total=self.steps_in_total)
        dtype = DTYPES[settings.dtype]
        low = dtype is not torch.float32
        training = Training(
            model=model,
            parallel=model,
            loss=load_loss(settings.loss),
            optimizer=optimizer,
            scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, share),
            scaler=GradScaler(self.device.type, enabled=dtype is torch.float16),
            device=self.device,
            dtype=dtype,
            region=autocast(self.device.type, dtype if low else None, enabled=low, policy=settings.policy),
            clip=settings.clip,
            world=self.world,
        )
        if before is not None:
            restore(training, before)
        return replace(training, parallel=in_parallel(model, self.device, self.world))

    def _batches(self, data: Dataset[Any], *, shuffle: bool) -> Batches:
        return Batches(
            data,
            batch_size=self.settings.batch_size,
            seed=self.settings.seed,
            device=self.device,
            shuffle=shuffle,
            workers=self.settings.workers,
            rank=self.world.rank,
            world_size=self.world.size,
        )

    def _steps_per_epoch(self) -> int:
        batches, limit = self._train_batches.batches_per_epoch(), self.settings.steps_per_epoch
        if batches is None:
            if not limit:
                raise TrainingError(
                    "the training set is a stream; say with steps_per_epoch (--steps-per-epoch) how many steps an epoch has"
                )
            return limit
        steps = math.ceil(batches / self.settings.accumulate)
        return min(steps, limit) if limit else steps

    def _set_random_state(self, before: Checkpoint | None) -> None:
        if before is not None:
            restore_random_state(before, self.world.rank, self.device)
        elif self.world.rank > 0:
            # The weights are equal on all ranks; the random draws of dropout are not.
            seed_everything((self.settings.seed + self.world.rank * 0x9E3779B97F4A7C15) % 2**63)

    def events(self) -> Iterator[StepRecord | Evaluation]:
        """Train to the end: yields a record of each step, and after the last of each epoch an evaluation.

        Whenever this yields, `checkpoint` may be called.

        Raises:
            TrainingError: If model, data and loss do not fit together, or the run has diverged.
            DataError: If the data cannot be read.
        """
        while not self.is_complete:
            yield from self._epoch()
            self.epochs_done, self.batches_done = self.epochs_done + 1, 0
            self.metrics = self._evaluate()
            yield Evaluation(epoch=self.epochs_done, step=self.steps_done, metrics=self.metrics)

    def _epoch(self) -> Iterator[StepRecord]:
        self.training.model.train()
        self.training.parallel.train()
        accumulate, epoch = self.settings.accumulate, self.epochs_done
        with closing(self._remaining_batches(epoch)) as batches:
            limit = self.settings.steps_per_epoch or None
            left = None if limit is None else limit - math.ceil(self.batches_done / accumulate)
            for group in islice(_groups(batches, accumulate), left):
                self._statistics.keep()
                record = self._step(group)
                if is_bad(record):
                    self._statistics.undo_if_not_finite()
                self.steps_done, self.batches_done = record.step, self.batches_done + len(group)
                self._watch.look(record, group)
                yield record
        if self.batches_done == 0:
            raise DataError(f"the training set of {self.settings.data} gave no batch in epoch {epoch + 1}")

    def _remaining_batches(self, epoch: int) -> Generator[Batch, None, None]:
        batches = _announcing_failure(self._train_batches.epoch(epoch, skip=self.batches_done), self.world)
        if self._train_batches.same_on_all_ranks:
            yield from batches
        else:
            yield from until_one_ends(batches)

    def _step(self, batches: list[Batch]) -> StepRecord:
        step, names = self.steps_done + 1, self.settings
        message = f"{names.model}, {names.data}, {names.loss} and {names.optimizer} do not fit together: the first step"
        with first_error_in_one_line(
            message, is_first=step == self._steps_before + 1, model=self.training.model, inputs=batches[0][0]
        ):
            return train_step(
                self.training, batches, step=step, epoch=self.epochs_done + 1, recording=self._recording.of_step(step)
            )

    def _evaluate(self) -> dict[str, float]:
        training = self.training
        self.world.share_buffers(training.model)
        # Always the first epoch, so that the items draw the same random numbers in each evaluation.
        batches = self._held_out_batches.epoch(0)
        names = self.settings
        message = f"{names.model}, {names.data} and {names.loss} do not fit together: the first evaluation"
        with first_error_in_one_line(message, is_first=self.epochs_done == self._epochs_before + 1):
            metrics = evaluate(training.model, training.loss, batches, training.region, world=self.world)
        if not metrics:
            raise DataError(f"the held-out set of {self.settings.data} has no items")
        self._watch.look_at_evaluation(metrics)
        if self.is_complete and self.skipped_steps == self.steps_done:
            raise TrainingError(
                f"nothing was learned: all {self.steps_done} steps were skipped, because gradients overflowed at every loss "
                f"scale down to {training.scaler.get_scale():g}; train for more steps, try bfloat16 or a smaller loss"
            )
        return metrics

    def require_savable(self) -> None:
        """Check, before an epoch is spent, that a checkpoint can hold the states of model and optimizer.

        Raises:
            CheckpointError: If it cannot.
        """
        training = self.training
        require_readable({"weights": training.model.state_dict(), "optimizer": training.optimizer.state_dict()})

    def checkpoint(self) -> Checkpoint:
        """Make a checkpoint. All processes must call this; rank 0 saves its own."""
        training, settings = self.training, self.settings
        first_rng, *other_rngs = self.world.gather(random_state(self.device))
        return Checkpoint(
            model=settings.model,
            data=settings.data,
            weights={name: _frozen(value) for name, value in training.model.state_dict().items()},
            optimizer=training.optimizer.state_dict(),
            scheduler=training.scheduler.state_dict(),
            scaler=training.scaler.state_dict(),
            policy=settings.policy,
            dtype=settings.dtype,
            epoch=self.epochs_done,
            batch=self.batches_done,
            step=self.steps_done,
            rng=first_rng,
            other_ranks=other_rngs,
            metrics=self.metrics,
            record=self.record,
            versions={"halfserve": version("halfserve"), "torch": str(torch.__version__)},
            settings=settings.to_checkpoint() | {"world_size": self.world.size},
        )


def _frozen(value: Any) -> Any:
    # The result of a module's `get_extra_state` may be anything.
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else deepcopy(value)


def _groups(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    iterator = iter(items)
    while group := list(islice(iterator, size)):
        yield group


def _announcing_failure(batches: Iterator[Item], world: World) -> Iterator[Item]:
    # Ranks that read a stream in step all fail when one does; the rank with the broken data must report it.
    try:
        yield from batches
    except Exception:
        world.fails_first()
        raise
