from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from export.to_onnx.export_onnx import export_onnx
from tests.export.to_onnx.answers import fed, session

SIDES = [0.0, -0.0, 1.0, -1.0, 2.5, -2.5, math.inf, -math.inf, math.nan]
Y, X = (torch.tensor([side]) for side in zip(*itertools.product(SIDES, SIDES), strict=True))


class Calling(nn.Module):
    """A function of one or two inputs."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return self.function(x) if y is None else self.function(x, y)


def require_same(function: Callable[..., Tensor], *inputs: Tensor) -> None:
    module = Calling(function).eval()
    found = fed(session(export_onnx(module, inputs)), dict(zip("xy", inputs, strict=False)))["output"]
    wanted = module(*inputs).numpy()
    assert found.dtype == wanted.dtype
    np.testing.assert_allclose(found, wanted, rtol=2e-3 if wanted.dtype == np.float16 else 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_an_angle_is_in_the_quarter_that_both_signs_say(dtype: torch.dtype) -> None:
    require_same(torch.atan2, Y.to(dtype), X.to(dtype))


def test_an_angle_of_a_complex_number_is_the_one_between_its_parts() -> None:
    require_same(lambda real, imaginary: torch.complex(real, imaginary).angle(), X, Y)
    require_same(lambda x: torch.angle(torch.fft.rfft(x))[..., :2], torch.tensor([[-1.0, -2, -3, -4.5], [1, 2, 3, 4]]))


@pytest.mark.parametrize(
    "x",
    [torch.tensor([SIDES]), torch.tensor([SIDES]).half(), torch.tensor([[-3, 0, 3]]), torch.tensor([[True, False]])],
    ids=["float32", "float16", "int64", "bool"],
)
def test_an_angle_of_a_real_number_is_half_a_turn_or_none(x: Tensor) -> None:
    require_same(torch.angle, x)


@pytest.mark.parametrize(
    "x", [torch.tensor([SIDES]), torch.tensor([SIDES]).half(), torch.tensor([[-3, 0, 3]])], ids=["float32", "float16", "int64"]
)
def test_the_sign_of_a_zero_is_seen(x: Tensor) -> None:
    require_same(torch.signbit, x)
