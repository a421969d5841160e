"""What a run of the example is told."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from amp_core import Policy
from amp_core.policy import PolicyError

SIZE_ON_CPU, SIZE_ON_ACCELERATOR = 32, 512


class CheckerboardError(Exception):
    """A setting that cannot be used, for a reason that its user can mend."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of one training, the same for each precision.

    Attributes:
        device: That is trained on.
        steps: Of the optimizer, skipped ones included.
        size: Height and width of the image, in pixels.
        squares: Along each side of the image.
        width: Channels of the hidden layers.
        learning_rate: Of Adam.
        policy: Of autocast, in its string form.
        seed: Of the weights.

    Raises:
        CheckerboardError: If a value is out of its range.
    """

    device: torch.device
    steps: int = 120
    size: int = SIZE_ON_CPU
    squares: int = 4
    width: int = 256
    learning_rate: float = 1e-2
    policy: str = "native"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "squares", "width"):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        _require(self.size >= 2, f"size must be at least 2 pixels, got {self.size}")
        _require(self.squares <= self.size, f"an image of {self.size} pixels has no room for {self.squares} squares a side")
        _require(0 < self.learning_rate < 1, f"learning_rate must be between 0 and 1, got {self.learning_rate}")
        _require(0 <= self.seed < 2**63, f"seed must be between 0 and 2**63 - 1, got {self.seed}")
        try:
            Policy.parse(self.policy)
        except PolicyError as error:
            raise CheckerboardError(str(error)) from error


def device_named(name: str) -> torch.device:
    """The device of that name; `auto` is the accelerator if there is one, else the CPU.

    Raises:
        CheckerboardError: If it cannot be used here.
    """
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # `meta` makes tensors, but has no numbers for them
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckerboardError(f"device {name!r} cannot be used here ({reason}); try 'cpu' or 'auto'") from error
    return device


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise CheckerboardError(otherwise)
