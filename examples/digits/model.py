"""A small convolutional classifier that creates tensors in `forward` in the dtype of its input."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from halfserve.export.dtype_check.dtype_inheritance import new_linspace, new_ones


class DigitsNet(nn.Module):
    """Three convolutions, the first with coordinates as input channels, and a linear layer.

    The coordinates are two more input channels (Liu et al., "An intriguing failing of convolutional neural networks and the
    CoordConv solution", 2018). They have the dtype and device of the image: bare `torch.linspace` would make float32 ones,
    which cast a half model's activations up or fail in it.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.features = nn.Sequential(
            _block(3, width),
            nn.MaxPool2d(2),
            _block(width, 2 * width),
            _block(2 * width, 2 * width),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.classifier = nn.Linear(8 * width, 10)

    def forward(self, image: Tensor) -> Tensor:
        """Classify images.

        Args:
            image: Shape (n, 1, height, width), brightness between 0 and 1, in the model's dtype.

        Returns:
            The logits of the ten digits, shape (n, 10).
        """
        logits: Tensor = self.classifier(self.features(with_coordinates(image)))
        return logits


def with_coordinates(image: Tensor) -> Tensor:
    """Append two channels to images of shape (n, c, height, width): row and column, each from -1 to 1."""
    n, _, height, width = image.shape
    ones = new_ones(image, (n, 1, height, width))
    rows = new_linspace(image, -1.0, 1.0, height).reshape(1, 1, height, 1)
    columns = new_linspace(image, -1.0, 1.0, width).reshape(1, 1, 1, width)
    return torch.cat([image, ones * rows, ones * columns], dim=1)


def model() -> nn.Module:
    """Return an untrained `DigitsNet`; its weights depend on torch's random state."""
    return DigitsNet()


def _block(channels_in: int, channels_out: int) -> nn.Sequential:
    convolution = nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(channels_out), nn.ReLU())
