"""The transformer: two layers of attention and perceptron, normalized before each."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from examples.transformer.attention import SelfAttention
from examples.transformer.data import LENGTH, PADDING

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
        """Say for each place how likely each digit is.

        Args:
            tokens: int64, shape (n, 8): a digit plus 1, or 0 for padding at the end.

        Returns:
            The logits of the digits in ascending order, shape (n, 8, 10); without meaning where there is padding.
        """
        present = tokens != PADDING
        x = self.of_token(tokens) + self.of_place
        for layer in self.layers:
            x = layer(x, present)
        logits: Tensor = self.to_logits(x)
        return logits


class Layer(nn.Module):
    """Attention, then a perceptron at each place; both add to what comes in."""

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
    """An untrained `Sorter`; its weights depend on torch's random state."""
    return Sorter()
