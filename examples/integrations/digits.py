"""The digits classifier in other frameworks, with our autocast, policy and GradScaler in them: what the examples share.

`python -m halfserve.examples.integrations.lightning_trainer`, `.lightning_fabric` and `.accelerate_loop` each print the
accuracy on the held-out digits, the number of skipped steps, and the scale at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from rich import print as show
from torch.utils.data import DataLoader

from halfserve.examples.digits.data import data

if TYPE_CHECKING:
    from torch import nn

    from halfserve.amp_core.integrations.late_update import LateUpdate

POLICY = "cuda"  # the documented CUDA lists, on any device
LEARNING_RATE = 0.01


@dataclass(frozen=True, kw_only=True)
class TrainingOutcome:
    """The result of a training."""

    accuracy: float  # the share of the held-out digits that are recognized
    skipped: int  # the number of steps skipped because a gradient was not finite
    scale: float  # the loss scale at the end

    def __str__(self) -> str:
        return f"{self.accuracy:.1%} of the held-out digits recognized; {self.skipped} steps skipped; scale {self.scale:g}"


def outcome(model: nn.Module, skipped: int, scaler: LateUpdate | None) -> TrainingOutcome:
    """Measure the trained model, and print the outcome."""
    result = TrainingOutcome(accuracy=accuracy(model), skipped=skipped, scale=scaler.get_scale() if scaler else 1.0)
    show(str(result))
    return result


def batches() -> DataLoader[Any]:
    """Return the training set in shuffled batches of pairs (image, digit)."""
    return DataLoader(data()[0], batch_size=64, shuffle=True)


def accuracy(model: nn.Module) -> float:
    """Return the share of the held-out digits that a model, on any device, recognizes."""
    device = next(model.parameters()).device
    images, digits = (tensor.to(device) for tensor in data()[1].tensors)
    with torch.inference_mode():
        recognized: torch.Tensor = model.eval()(images).argmax(1) == digits
    return recognized.float().mean().item()
