"""The two ends of the regression: where a pixel is, and how bright it is."""

from __future__ import annotations

import torch
from torch import Tensor


def coordinate_grid(size: int) -> Tensor:
    """The coordinates (x, y) of each pixel, from -1 at the left and the top to 1; float32 of shape (1, 2, size, size)."""
    along = torch.linspace(-1.0, 1.0, size)
    return torch.stack(torch.meshgrid(along, along, indexing="xy"))[None]


def checkerboard(size: int, squares: int) -> Tensor:
    """A board of `squares` x `squares` fields, 0.0 (top left) and 1.0 in turn; float32 of shape (1, 1, size, size)."""
    field = torch.arange(size) * squares // size
    return ((field[:, None] + field) % 2).float()[None, None]
