"""Self-attention over padded sequences, in whatever dtype it is called in."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class SelfAttention(nn.Module):
    """Every position looks at every position that is not padding, with several heads.

    Source: Vaswani et al., "Attention is all you need", 2017.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_queries_keys_values = nn.Linear(width, 3 * width)
        self.to_output = nn.Linear(width, width)

    def forward(self, x_NLD: Tensor, present_NL: Tensor) -> Tensor:  # noqa: N803  (suffixes: n sequences, length, depth)
        """Mix the positions.

        Args:
            x_NLD: Shape (n, length, width), floating point.
            present_NL: bool, shape (n, length); False is padding, which nobody looks at.

        Returns:
            Shape and dtype of x, or the dtype of the autocast region.
        """
        n, length, width = x_NLD.shape
        split = self.to_queries_keys_values(x_NLD).reshape(n, length, 3, self.heads, width // self.heads)
        queries, keys, values = split.permute(2, 0, 3, 1, 4).unbind()  # each (n, heads, length, width / heads)
        # Scaled before the product: after it would be too late, where it overflows.
        scores = (queries / math.sqrt(width // self.heads)) @ keys.transpose(-2, -1)
        # A sequence of padding alone then looks everywhere alike; minus infinity would give NaN.
        scores = scores.masked_fill(~present_NL[:, None, None, :], torch.finfo(scores.dtype).min)
        mixed = scores.softmax(-1).to(values.dtype) @ values
        out: Tensor = self.to_output(mixed.transpose(1, 2).reshape(n, length, width))
        return out
