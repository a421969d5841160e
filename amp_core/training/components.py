"""The components of a training, built from settings and restored from checkpoints: device, model, loss, optimizer."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, IterableDataset

from halfserve.amp_core.checkpoint import Checkpoint, CheckpointError, load_weights
from halfserve.amp_core.factory import call_factory, load_factory, one_line
from halfserve.amp_core.policy.operations import has_autocast
from halfserve.amp_core.random_state import set_random_state
from halfserve.amp_core.training.distributed import World
from halfserve.amp_core.training.step import Training
from halfserve.amp_core.training.training_settings import TrainingError


def training_device(name: str, world: World) -> torch.device:
    """Find the device (`auto` is the accelerator if there is one), and check that it works.

    Several processes take a GPU each, by their numbers on the machine.

    Raises:
        TrainingError: If there is no such device here, or several processes would share one GPU.
    """
    try:
        device = _named(name)
        if world.size > 1 and device.type == "cuda" and torch.cuda.is_available():
            device = _own_gpu(name, world)
        torch.empty(0, device=device)
    except TrainingError:
        raise
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).splitlines()[0]
        raise TrainingError(f"device {name!r} cannot be used here ({reason}); try 'cpu' or 'auto'") from error
    if not has_autocast(device.type):
        raise TrainingError(f"device {name!r} cannot be used here (torch has no autocast for it); try 'cpu' or 'auto'")
    return device


def _named(name: str) -> torch.device:
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    return torch.device(name)


def _own_gpu(name: str, world: World) -> torch.device:
    if ":" in name:
        raise TrainingError(f"{world.size} processes cannot share {name!r}; use 'cuda', and each takes a GPU of its own")
    if world.local_rank >= torch.cuda.device_count():
        raise TrainingError(
            f"there are {torch.cuda.device_count()} GPUs here and more processes than that; start torchrun with "
            f"--nproc-per-node {torch.cuda.device_count()}"
        )
    own = torch.device("cuda", world.local_rank)
    torch.cuda.set_device(own)
    return own


def build_model(spec: str) -> nn.Module:
    """Call a model factory and check that its model can be trained.

    Raises:
        FactoryError: If the factory cannot be imported or called.
        TrainingError: If it returns no module, one without parameters, or one with parameters without values or in half
            precision.
    """
    model = call_factory(spec)
    if not isinstance(model, nn.Module):
        raise TrainingError(f"{spec!r} returned a {type(model).__name__}; expected a torch.nn.Module")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TrainingError(f"the model that {spec!r} builds has no parameter to train")
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if empty:
        raise TrainingError(f"the parameter {empty[0]!r} of {spec!r} is on the device 'meta', where there are no values")
    halves = [name for name, parameter in model.named_parameters() if parameter.dtype in {torch.float16, torch.bfloat16}]
    if halves:
        raise TrainingError(
            f"the parameter {halves[0]!r} of {spec!r} is in half precision; build it in float32, autocast casts it"
        )
    return model


def load_loss(spec: str) -> Callable[[Any, Any], Tensor]:
    """Load a function (output, target) -> scalar, or instantiate a class whose objects are such functions."""
    loss = load_factory(spec)
    return cast("Callable[[Any, Any], Tensor]", call_factory(spec) if inspect.isclass(loss) else loss)


def build_optimizer(spec: str, model: nn.Module, learning_rate: float) -> Optimizer:
    """Call an optimizer factory with the trainable parameters and `lr`.

    Raises:
        FactoryError: If the factory cannot be imported.
        TrainingError: If the call fails, or returns no optimizer.
    """
    factory = load_factory(spec)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        optimizer = factory(parameters, lr=learning_rate)
    except Exception as error:
        raise TrainingError(
            f"{spec!r} raised {one_line(error)} when called with the parameters and lr={learning_rate:g}"
        ) from error
    if not isinstance(optimizer, Optimizer):
        raise TrainingError(f"{spec!r} returned a {type(optimizer).__name__}; expected a torch.optim.Optimizer")
    return optimizer


def warmup_and_cosine(step: int, total: int) -> float:
    """Return the share of the highest learning rate at a step, from 0: rising over the first twentieth, then half a cosine down
    to 0.

    Source of the shape: Loshchilov and Hutter, "SGDR", 2017, with a linear warm-up before it.
    """
    warmup = max(1, total // 20)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))


def in_parallel(model: nn.Module, device: torch.device, world: World) -> nn.Module:
    """Wrap a model for several processes; alone it stays as it is.

    Weights and buffers are those of rank 0. BatchNorm normalizes each process's share by itself, and its running statistics are
    those of rank 0's share: before each step they are copied to the others. For statistics over the whole batch let the factory
    return `torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)` (CUDA only).

    Raises:
        TrainingError: If the model differs from those of the other processes, or has parameters without a shape yet.
    """
    if world.size == 1:
        return model
    # Allows parameters that a step does not use. It also keeps DistributedDataParallel from reordering its gradient buckets
    # after the first step, which would make a resumed run sum in another order than an uninterrupted one.
    ids = [device.index] if device.type == "cuda" else None
    wrapped = _WithAnUnusedParameter(model).to(device)
    try:
        return DistributedDataParallel(wrapped, device_ids=ids, find_unused_parameters=True)
    except RuntimeError as error:
        raise TrainingError(f"the model cannot be trained in {world.size} processes: {one_line(error)}") from error


def require_same_data(data: Sequence[Dataset[Any]], world: World) -> None:
    """Refuse data sets whose lengths differ from those in the other processes.

    Raises:
        TrainingError: If they differ.
    """
    mine = ["an unknown number of" if isinstance(part, IterableDataset) else str(len(part)) for part in data]  # type: ignore[arg-type]  # (all others have a length)
    everywhere = world.gather(mine)
    for rank, (training, held_out) in enumerate(everywhere):
        if [training, held_out] != everywhere[0]:
            raise TrainingError(
                f"the data sets differ between the processes: rank 0 has {everywhere[0][0]} items to train on and "
                f"{everywhere[0][1]} held out, rank {rank} has {training} and {held_out}; return the same ones in each, "
                "they are shared out afterwards"
            )


class _WithAnUnusedParameter(nn.Module):
    """With find_unused_parameters, DistributedDataParallel warns if there is none, past Python's filters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.unused = nn.Parameter(torch.zeros(()))

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.model(*inputs, **named)


def restore(training: Training, checkpoint: Checkpoint) -> None:
    """Load the weights and the states of optimizer, scheduler and scaler.

    Raises:
        CheckpointError: If they do not fit; the training is unusable then.
    """
    load_weights(training.model, checkpoint.weights, checkpoint.model)
    with _refusing("optimizer"):
        training.optimizer.load_state_dict(checkpoint.optimizer)
    with _refusing("scheduler"):
        training.scheduler.load_state_dict(_of_scheduler(training.scheduler, checkpoint))
    with _refusing("scaler"):
        training.scaler.load_state_dict(checkpoint.scaler)


def restore_random_state(checkpoint: Checkpoint, rank: int, device: torch.device) -> None:
    """Restore a rank's random generators.

    Raises:
        CheckpointError: If the checkpoint's states are invalid.
    """
    with _refusing("random"):
        set_random_state([checkpoint.rng, *checkpoint.other_ranks][rank], device)


@contextmanager
def _refusing(part: str) -> Iterator[None]:
    # torch raises different exceptions for different invalid states.
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"the checkpoint's {part} state does not fit this run: {one_line(error)}") from error


def _of_scheduler(scheduler: LRScheduler, checkpoint: Checkpoint) -> dict[str, Any]:
    # torch's schedulers load all attributes that a state names, their methods too.
    saved, own = checkpoint.scheduler, scheduler.state_dict()
    state = {name: saved[name] for name in own if name in saved}
    for name, value in state.items():
        if not _is_alike(value, own[name]):
            raise ValueError(f"{name} is {value!r}, expected such as {own[name]!r}")
    if not 0 <= saved["last_epoch"] <= checkpoint.step:
        raise ValueError(f"last_epoch is {saved['last_epoch']}, expected 0 to {checkpoint.step}, the steps attempted")
    return state


def _is_alike(value: Any, own: Any) -> bool:
    if not isinstance(own, list):
        return type(value) is type(own)
    return type(value) is list and len(value) == len(own) and all(map(_is_alike, value, own))
