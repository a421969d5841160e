"""From a checkpoint back into what is trained, or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amp_core.checkpoint import CheckpointError, load_weights

if TYPE_CHECKING:
    from amp_core.checkpoint import Checkpoint
    from amp_core.training.step import Training


def restore(training: Training, checkpoint: Checkpoint) -> None:
    """Load the weights and the states of optimizer, scheduler and scaler.

    Raises:
        CheckpointError: If they do not fit; then the training is not to be used.
    """
    load_weights(training.model, checkpoint.weights, checkpoint.model)
    try:
        training.optimizer.load_state_dict(checkpoint.optimizer)
        training.scheduler.load_state_dict(checkpoint.scheduler)
        training.scaler.load_state_dict(checkpoint.scaler)
    except (ValueError, RuntimeError, KeyError) as error:
        raise CheckpointError(
            f"the checkpoint's optimizer state does not fit this run: {str(error).splitlines()[0]}"
        ) from error
