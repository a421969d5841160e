"""The network: the same small perceptron at every pixel, written as 1x1 convolutions."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

HIDDEN_LAYERS = 3


def network(width: int = 256) -> nn.Sequential:
    """2 -> width -> width -> width -> 1 channels, with BatchNorm and ReLU between; its weights depend on torch's random state.

    In mixed precision the convolutions run in float16 or bfloat16; BatchNorm computes its statistics in float32 either way.
    """
    channels = (2, *[width] * HIDDEN_LAYERS)
    hidden = [layer for pair in pairwise(channels) for layer in _layer(*pair)]
    return nn.Sequential(*hidden, nn.Conv2d(width, 1, kernel_size=1))


def _layer(channels_in: int, channels_out: int) -> tuple[nn.Module, ...]:
    # BatchNorm brings a bias of its own.
    return nn.Conv2d(channels_in, channels_out, kernel_size=1, bias=False), nn.BatchNorm2d(channels_out), nn.ReLU()
