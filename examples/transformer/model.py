"""A transformer of two layers that sorts digits: attention and perceptron, normalized before each."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from halfserve.examples.transformer.data import LENGTH, PADDING


class SelfAttention(nn.Module):
    """Multi-head attention in which every position attends to every position that is not padding.

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
            present_NL: bool, shape (n, length); False is padding, which is masked.

        Returns:
            Shape and dtype of x, or the dtype of the autocast region.
        """
        n, length, width = x_NLD.shape
        split = self.to_queries_keys_values(x_NLD).reshape(n, length, 3, self.heads, width // self.heads)
        queries, keys, values = split.permute(2, 0, 3, 1, 4).unbind()  # each (n, heads, length, width / heads)
        # Scaled before the product, which could overflow in float16.
        scores = (queries / math.sqrt(width // self.heads)) @ keys.transpose(-2, -1)
        # A sequence of padding alone attends uniformly; minus infinity would give NaN.
        scores = scores.masked_fill(~present_NL[:, None, None, :], torch.finfo(scores.dtype).min)
        mixed = scores.softmax(-1).to(values.dtype) @ values
        out: Tensor = self.to_output(mixed.transpose(1, 2).reshape(n, length, width))
        return out


DIGITS = 10
WIDTH, HEADS, LAYERS = 32, 2, 2


class Sorter(nn.Module):
    """From a sequence of digits to the same digits in ascending order, all places at once."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS, layers: int = LAYERS) -> None:
        super().__init__()
        self.of_token = nn.Embedding(1 + DIGITS, width)
        self.of_place = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.to_logits = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, DIGITS))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each place.

        Args:
            tokens: int64, shape (n, 8): a digit plus 1, or 0 for padding at the end.

        Returns:
            The logits of the digits in ascending order, shape (n, 8, 10); meaningless at padded places.
        """
        present = tokens != PADDING
        x = self.of_token(tokens) + self.of_place
        for layer in self.layers:
            x = layer(x, present)
        logits: Tensor = self.to_logits(x)
        return logits


class Layer(nn.Module):
    """Attention, then a perceptron at each place; both are residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, present: Tensor) -> Tensor:
        """Shape (n, length, width) in and out; `present` is False where there is padding, shape (n, length)."""
        x = x + self.attention(self.before_attention(x), present)
        out: Tensor = x + self.perceptron(x)
        return out


def model() -> nn.Module:
    """Return an untrained `Sorter`; its weights depend on torch's random state."""
    return Sorter()
