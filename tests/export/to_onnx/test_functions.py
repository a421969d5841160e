from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from export.halving.to_half import to_half
from export.to_onnx.export_onnx import export_onnx
from tests.export.to_onnx.answers import difference, fed, session


class Calling(nn.Module):
    """A function of two inputs."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.function(x, y)


@pytest.mark.parametrize("function", [torch.logaddexp, torch.logaddexp2])
def test_a_sum_of_exponentials_holds_far_from_zero(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    far = torch.tensor([[-500.0, 300.0, 0.5, -math.inf, -math.inf, math.inf]])
    near = torch.tensor([[-501.0, 299.5, -0.5, -math.inf, 7.0, 7.0]])
    module = Calling(function).eval()
    model = export_onnx(module, [far, near])
    np.testing.assert_allclose(fed(session(model), {"x": far, "y": near})["output"], module(far, near), rtol=1e-6)


def test_a_sum_of_exponentials_holds_in_half() -> None:
    module = Calling(torch.logaddexp).eval()
    inputs = {"x": torch.tensor([[-50.0, 30.0]]), "y": torch.tensor([[-51.0, 29.5]])}
    opened = session(export_onnx(to_half(module).module, [value.half() for value in inputs.values()]))
    assert difference(module, opened, inputs, half=True) < 1e-3
