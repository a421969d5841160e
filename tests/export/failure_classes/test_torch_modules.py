"""The classes that a torch module shows before there is any ONNX: 1, 2, 4 and 11, each beside `.half()`."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from halfserve.export.half_module.to_half import to_half

Halve = Callable[[nn.Module], nn.Module]


def plain_half(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module).eval().half()


def ours(module: nn.Module) -> nn.Module:
    return to_half(module).module


def batch_norm(channels: int, gain: float = 1) -> nn.Module:
    """With the variance that PP-OCRv4's detector has."""
    module = nn.BatchNorm2d(channels)
    module.get_buffer("running_var").fill_(9.8e7)
    module.weight.data.fill_(gain)
    return module


def norm() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.ReLU(), batch_norm(3, gain=9e3)), torch.rand(2, 3, 4, 4)


def folded_norm() -> tuple[nn.Module, Tensor]:
    convolution = nn.Conv2d(3, 4, 3)
    convolution.weight.data.mul_(3e4)
    return nn.Sequential(convolution, batch_norm(4), nn.ReLU()), torch.rand(2, 3, 6, 6)


class Scaled(nn.Module):
    """A parameter that vanishes in float16, and what makes up for it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = Scale()

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.scale(self.linear(x))
        return scaled


class Scale(nn.Module):
    """Times 2e-9, times 5e8."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("down", torch.full((4,), 2e-9))

    def forward(self, x: Tensor) -> Tensor:
        return x.float() * self.get_buffer("down") * 5e8


class Masked(nn.Module):
    """An additive mask of float32's lowest number, half of which is taken twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mask", torch.triu(torch.full((4, 4), torch.finfo(torch.float32).min), 1))

    def forward(self, x: Tensor) -> Tensor:
        mask = self.get_buffer("mask")
        return torch.softmax(self.linear(x) + mask * 0, -1) + torch.softmax(self.linear(x) + mask, -1)


class Rotary(nn.Module):
    """Cosines of positions times frequencies, as every Llama has them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.angles = Angles()

    def forward(self, x: Tensor) -> Tensor:
        rotated: Tensor = self.linear(x) * self.angles(torch.arange(4000, 4000 + x.shape[0])).to(x.dtype)
        return rotated


class Angles(nn.Module):
    """Shape (positions, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1 / 10000 ** (torch.arange(8) / 8))

    def forward(self, positions: Tensor) -> Tensor:
        frequencies = self.get_buffer("inv_freq")
        return torch.cos(positions[:, None].to(frequencies.dtype) * frequencies)


def batch(module: nn.Module, *shape: int) -> tuple[nn.Module, Tensor]:
    return module, torch.randn(shape)


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(norm, id="1 a variance over the range"),
        pytest.param(folded_norm, id="1 the same behind a convolution"),
        pytest.param(lambda: batch(Scaled(), 3, 4), id="2 a scale that vanishes"),
        pytest.param(lambda: batch(Masked(), 4, 4), id="4 a mask"),
        pytest.param(lambda: batch(Rotary(), 5, 8), id="11 rotary angles"),
    ],
)
@pytest.mark.parametrize(("halve", "right"), [(plain_half, False), (ours, True)], ids=["naive-fails", "ours-passes"])
def test_a_module_in_float16(halve: Halve, right: bool, build: Callable[[], tuple[nn.Module, Tensor]]) -> None:
    torch.manual_seed(0)
    module, inputs = build()
    with torch.no_grad():
        expected = module.eval()(inputs)
        answer = halve(module)(inputs.half()).float()
    close = torch.allclose(answer, expected, rtol=1e-2, atol=5e-3 * float(expected.abs().max()))
    assert close == right
