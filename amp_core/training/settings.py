"""The settings of a training run, and the errors that end one."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from halfserve.amp_core.policy import Policy


class TrainingError(RuntimeError):
    """A run cannot start or continue, for a reason that its user can fix."""


class PeerError(TrainingError):
    """Another process of the run failed first, and reports why."""


DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
# A resumed run gives the result of an uninterrupted one only if these are equal; the others may change.
_PART_OF_THE_RESULT = (
    "loss", "epochs", "batch_size", "accumulate", "steps_per_epoch", "optimizer", "learning_rate", "clip", "seed"
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """The settings of `train`, checked.

    Attributes:
        model: `MODULE:FACTORY` of the model.
        data: `MODULE:FACTORY` of the pair (training set, held-out set); their items are pairs (input, target).
        out: The folder for `checkpoint.pt`, `train.jsonl` and the other files.
        weights: A file or folder of weights that a new run starts from; None for the factory's initial weights.
        loss: `MODULE:FACTORY` of a function (output, target) -> scalar tensor, or of a module class.
        optimizer: `MODULE:FACTORY` of a function or class (parameters, lr=...) -> optimizer.
        dtype: `float16` (the loss is scaled), `bfloat16` or `float32` (neither autocast nor scaled).
        epochs: The number of passes over the training set.
        steps_per_epoch: The largest number of optimizer steps of an epoch; 0 ends it with the training set. A training set
            without a length needs it, because the learning-rate schedule depends on the number of all steps.
        batch_size: The number of items in a batch, for each process.
        accumulate: The number of batches of one optimizer step, which follows the mean of their losses.
        learning_rate: The highest; it warms up over a twentieth of the steps and then falls like a cosine.
        clip: The largest norm of all gradients together; 0 does not clip.
        seed: The seed of the weights, of the order of the items and of all random draws of the model.
        device: `auto` (the accelerator if there is one), `cpu`, `cuda`, `cuda:1`, ...
        policy: The autocast policy's string form.
        workers: Processes that make the batches; 0 makes them in this one.
        checkpoint_every: The interval of checkpoints in steps; 0 writes one only at the end of each epoch.
        patience: The number of steps in a row, skipped or with a non-finite loss, after which the cause is diagnosed.
        record_every: The interval in steps at which the dtypes and ranges of all operations are recorded; 0 never.
        tensorboard: Whether to write the scalars for TensorBoard.

    Raises:
        TrainingError: If a value is out of its range.
        PolicyError: If the policy cannot be read.
    """

    model: str
    data: str
    out: Path
    weights: Path | None = None
    loss: str = "torch.nn.functional:cross_entropy"
    optimizer: str = "torch.optim:AdamW"
    dtype: str = "float16"
    epochs: int = 20
    steps_per_epoch: int = 0
    batch_size: int = 64
    accumulate: int = 1
    learning_rate: float = 3e-3
    clip: float = 1.0
    seed: int = 0
    device: str = "auto"
    policy: str = "native"
    workers: int = 0
    checkpoint_every: int = 0
    patience: int = 10
    record_every: int = 0
    tensorboard: bool = False

    def __post_init__(self) -> None:
        _require(self.dtype in DTYPES, f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        for name in ("epochs", "batch_size", "accumulate", "patience"):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        for name, zero in (
            ("steps_per_epoch", "as many as there are"),
            ("workers", "batches are made in this process"),
            ("checkpoint_every", "at the end of each epoch only"),
            ("record_every", "no record"),
        ):
            _require(getattr(self, name) >= 0, f"{name} must be 0 ({zero}) or above, got {getattr(self, name)}")
        _require(0 < self.learning_rate < math.inf, f"learning_rate must be above 0 and finite, got {self.learning_rate}")
        _require(self.clip >= 0, f"clip must be 0 (no clipping) or above, got {self.clip}")
        _require(0 <= self.seed < 2**63, f"seed must be between 0 and 2**63 - 1, got {self.seed}")
        Policy.parse(self.policy)

    def to_checkpoint(self) -> dict[str, str | int | float]:
        """The settings that affect the result and have no field of their own in a checkpoint."""
        values: dict[str, Any] = asdict(self)
        return {name: values[name] for name in _PART_OF_THE_RESULT}


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise TrainingError(otherwise)
