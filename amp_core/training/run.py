"""A run's state: what is trained, how far it is, and how that goes into a checkpoint and comes out again."""

from __future__ import annotations

import inspect
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from amp_core.casting.autocast import autocast
from amp_core.checkpoint import Checkpoint, build_data
from amp_core.factory import call_factory, load_factory
from amp_core.scaling.grad_scaler import GradScaler
from amp_core.training.evaluation import evaluate
from amp_core.training.loop import Training, to_device, train_epoch, warmup_and_cosine
from amp_core.training.settings import DTYPES, TrainingError, TrainingSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from amp_core.training.log import StepRecord


class TrainingRun:
    """The state that moves on from epoch to epoch."""

    def __init__(self, settings: TrainingSettings, device: torch.device, before: Checkpoint | None) -> None:
        self.settings, self.device = settings, device
        self.train_set, self.held_out_set = build_data(settings.data)
        self.epochs_done, self.steps_done = 0, 0
        self.training = self._training()
        if before is not None:
            self._restore(before)

    def _training(self) -> Training:
        settings = self.settings
        model = _build_model(settings.model).to(self.device)
        total = settings.epochs * len(self._batches(self.train_set, shuffle_epoch=0))
        optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
        dtype = DTYPES[settings.dtype]
        low = dtype is not torch.float32
        return Training(
            model=model,
            loss=_load_loss(settings.loss),
            optimizer=optimizer,
            scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, partial(warmup_and_cosine, total=total)),
            scaler=GradScaler(self.device.type, enabled=dtype is torch.float16),
            region=autocast(self.device.type, dtype if low else None, enabled=low, policy=settings.policy),
            clip=settings.clip,
        )

    def _batches(self, data: Dataset[Any], *, shuffle_epoch: int | None) -> DataLoader[Any]:
        size = self.settings.batch_size
        if shuffle_epoch is None:
            return DataLoader(data, batch_size=size)
        # A generator per epoch: the order depends on the seed and the epoch, not on what was drawn before.
        order = torch.Generator().manual_seed((self.settings.seed * 1_000_003 + shuffle_epoch) % 2**63)
        is_enough = len(cast("Any", data)) >= size  # then all batches are full: a last one of 1 item would break BatchNorm
        return DataLoader(data, batch_size=size, shuffle=True, drop_last=is_enough, generator=order)

    def epoch(self) -> Iterator[StepRecord]:
        """Train for one more epoch.

        Raises:
            TrainingError: If model, data and loss do not fit together, or the numbers got out of hand.
        """
        batches = to_device(self._batches(self.train_set, shuffle_epoch=self.epochs_done), self.device)
        records = train_epoch(self.training, batches, epoch=self.epochs_done + 1, first_step=self.steps_done + 1)
        if self.steps_done == 0:
            records = _with_clear_first_error(records, self.settings)
        for record in records:
            self.steps_done = record.step
            yield record
        self.epochs_done += 1

    def checkpoint(self) -> Checkpoint:
        """Evaluate, and freeze everything."""
        training, settings = self.training, self.settings
        # First, because it may draw random numbers: a resumed run starts after it.
        batches = to_device(self._batches(self.held_out_set, shuffle_epoch=None), self.device)
        metrics = evaluate(training.model, training.loss, batches, training.region)
        return Checkpoint(
            model=settings.model,
            data=settings.data,
            weights={name: value.detach().cpu().clone() for name, value in training.model.state_dict().items()},
            optimizer=training.optimizer.state_dict(),
            scheduler=training.scheduler.state_dict(),
            scaler=training.scaler.state_dict(),
            policy=settings.policy,
            dtype=settings.dtype,
            epoch=self.epochs_done,
            step=self.steps_done,
            rng=_rng_states(self.device),
            metrics=metrics,
            versions={"halfserve": version("halfserve"), "torch": str(torch.__version__)},
            settings=settings.to_checkpoint(),
        )

    def _restore(self, checkpoint: Checkpoint) -> None:
        self.training.model.load_state_dict(checkpoint.weights)
        self.training.optimizer.load_state_dict(checkpoint.optimizer)
        self.training.scheduler.load_state_dict(checkpoint.scheduler)
        self.training.scaler.load_state_dict(checkpoint.scaler)
        self.epochs_done, self.steps_done = checkpoint.epoch, checkpoint.step
        torch.set_rng_state(checkpoint.rng["cpu"])
        if self.device.type == "cuda" and "cuda" in checkpoint.rng:
            torch.cuda.set_rng_state(checkpoint.rng["cuda"], self.device)


def _build_model(spec: str) -> nn.Module:
    model = call_factory(spec)
    if not isinstance(model, nn.Module):
        raise TrainingError(f"{spec!r} returned a {type(model).__name__}; expected a torch.nn.Module")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TrainingError(f"the model that {spec!r} builds has no parameter to train")
    halves = [name for name, parameter in model.named_parameters() if parameter.dtype in {torch.float16, torch.bfloat16}]
    if halves:
        raise TrainingError(
            f"the parameter {halves[0]!r} of {spec!r} is in half precision; build it in float32, autocast casts it"
        )
    return model


def _load_loss(spec: str) -> Callable[[Any, Any], Tensor]:
    loss = load_factory(spec)
    return cast("Callable[[Any, Any], Tensor]", call_factory(spec) if inspect.isclass(loss) else loss)


def _with_clear_first_error(records: Iterator[StepRecord], settings: TrainingSettings) -> Iterator[StepRecord]:
    # Shapes and dtypes that do not fit show in the first step; later errors are bugs, and keep their traceback.
    try:
        yield next(records)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        if isinstance(error, TrainingError):
            raise
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        raise TrainingError(
            f"{settings.model}, {settings.data} and {settings.loss} do not fit together: the first step raised {reason}"
        ) from error
    yield from records


def _rng_states(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    return states | {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else states
