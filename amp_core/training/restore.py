"""From a checkpoint back into what is trained, or not at all."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from amp_core.checkpoint import CheckpointError, load_weights
from amp_core.training.errors import one_line
from amp_core.training.random_state import set_random_state

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch.optim.lr_scheduler import LRScheduler

    from amp_core.checkpoint import Checkpoint
    from amp_core.training.step import Training


def restore(training: Training, checkpoint: Checkpoint) -> None:
    """Load the weights and the states of optimizer, scheduler and scaler.

    Raises:
        CheckpointError: If they do not fit; then the training is not to be used.
    """
    load_weights(training.model, checkpoint.weights, checkpoint.model)
    with _refusing("optimizer"):
        training.optimizer.load_state_dict(checkpoint.optimizer)
    with _refusing("scheduler"):
        training.scheduler.load_state_dict(_of_scheduler(training.scheduler, checkpoint))
    with _refusing("scaler"):
        training.scaler.load_state_dict(checkpoint.scaler)


def restore_random_state(checkpoint: Checkpoint, rank: int, device: torch.device) -> None:
    """Go on with a rank's random generators where they were.

    Raises:
        CheckpointError: If the checkpoint's states are none.
    """
    with _refusing("random"):
        set_random_state([checkpoint.rng, *checkpoint.other_ranks][rank], device)


@contextmanager
def _refusing(part: str) -> Iterator[None]:
    # What torch raises for a state that is none depends on where it stumbles.
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"the checkpoint's {part} state does not fit this run: {one_line(error)}") from error


def _of_scheduler(scheduler: LRScheduler, checkpoint: Checkpoint) -> dict[str, Any]:
    # torch's schedulers take over whatever attributes a state names, their methods too.
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
