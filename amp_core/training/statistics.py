"""Running statistics: what normalization layers write in forward, even where the step is then skipped."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_LAYERS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d
)  # fmt: skip


class RunningStatistics:
    """Keeps one batch that overflows in forward from staying in BatchNorm's averages for ever: an infinity never leaves a mean.

    Args:
        model: Whose normalization layers to look after.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = [module for module in model.modules() if isinstance(module, _LAYERS)]
        self._kept: list[Tensor] = []

    def keep(self) -> None:
        """Remember them, before a step."""
        self._kept = [buffer.clone() for buffer in self._buffers()]

    def undo_if_not_finite(self) -> None:
        """Set them back if one is not finite, after a step that went wrong."""
        now = self._buffers()
        if any(not torch.isfinite(buffer).all() for buffer in now):
            for buffer, before in zip(now, self._kept, strict=True):
                buffer.copy_(before)

    def _buffers(self) -> list[Tensor]:
        return [buffer for layer in self._layers for buffer in layer.buffers(recurse=False)]
