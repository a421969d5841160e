"""What a training run is told."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from amp_core.policy import Policy

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
# What must be the same for a resumed run to give the result of an uninterrupted one; `out` and `device` may change.
_PART_OF_THE_RESULT = ("loss", "epochs", "batch_size", "learning_rate", "clip", "seed")


class TrainingError(RuntimeError):
    """A run that cannot start or go on, for a reason that its user can mend."""


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """The settings of `train`, checked.

    Attributes:
        model: `MODULE:FACTORY` of the model.
        data: `MODULE:FACTORY` of the pair (training set, held-out set); their items are pairs (input, target).
        out: The folder for `checkpoint.pt` and `train.jsonl`.
        loss: `MODULE:FACTORY` of a function (output, target) -> scalar tensor, or of a module class that is one.
        dtype: `float16` (the loss is scaled), `bfloat16` or `float32` (neither autocast nor scaled).
        epochs: How often the training set is gone through.
        batch_size: In items.
        learning_rate: Of AdamW, at its highest; it warms up over a twentieth of the steps and then falls like a cosine.
        clip: The largest norm of all gradients together; 0 does not clip.
        seed: Of the weights, the order of the items and whatever the model draws.
        device: `auto` (the accelerator if there is one), `cpu`, `cuda`, `cuda:1`, ...
        policy: The autocast policy's string form.

    Raises:
        TrainingError: If a value is out of its range.
        PolicyError: If the policy cannot be read.
    """

    model: str
    data: str
    out: Path
    loss: str = "torch.nn.functional:cross_entropy"
    dtype: str = "float16"
    epochs: int = 20
    batch_size: int = 64
    learning_rate: float = 3e-3
    clip: float = 1.0
    seed: int = 0
    device: str = "auto"
    policy: str = "native"

    def __post_init__(self) -> None:
        _require(self.dtype in DTYPES, f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        _require(self.epochs >= 1, f"epochs must be at least 1, got {self.epochs}")
        _require(self.batch_size >= 1, f"batch_size must be at least 1, got {self.batch_size}")
        _require(0 < self.learning_rate < math.inf, f"learning_rate must be above 0 and finite, got {self.learning_rate}")
        _require(self.clip >= 0, f"clip must be 0 (no clipping) or above, got {self.clip}")
        _require(0 <= self.seed < 2**63, f"seed must be between 0 and 2**63 - 1, got {self.seed}")
        Policy.parse(self.policy)

    def to_checkpoint(self) -> dict[str, str | int | float]:
        """Those settings that shape the result and have no place of their own in a checkpoint."""
        values: dict[str, Any] = asdict(self)
        return {name: values[name] for name in _PART_OF_THE_RESULT}

    def torch_device(self) -> torch.device:
        """The device to train on.

        Raises:
            TrainingError: If there is no such device here.
        """
        if self.device == "auto":
            return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        try:
            device = torch.device(self.device)
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = str(error).splitlines()[0]
            raise TrainingError(f"device {self.device!r} cannot be used here ({reason}); try 'cpu' or 'auto'") from error
        return device


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise TrainingError(otherwise)
