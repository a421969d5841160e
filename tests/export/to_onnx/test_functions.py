from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from export.errors import ExportError
from export.halving.to_half import to_half
from export.to_onnx.export_onnx import export_onnx
from tests.export.to_onnx.answers import difference, fed, session

PLACES = torch.tensor([[0, 0, 2], [1, 0, 0]])


class Calling(nn.Module):
    """A function of two inputs."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.function(x, y)


def mean_of_places(*, include_self: bool) -> nn.Module:
    return Calling(lambda x, y: x.scatter_reduce(1, PLACES, y, "mean", include_self=include_self)).eval()


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


@pytest.mark.parametrize("sizes", [(), ({0: "batch", 1: "length"},)], ids=["fixed", "of any length"])
def test_a_running_sum_of_exponentials_holds_far_below_the_largest(sizes: tuple[Any, ...]) -> None:
    class Running(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.logcumsumexp(x, 1), torch.logcumsumexp(x, -1)

    x = torch.arange(2 * 7 * 3).reshape(2, 7, 3) * 40.0 - 900
    opened = session(export_onnx(Running().eval(), {"x": x}, dynamic_shapes=sizes))
    assert difference(Running(), opened, {"x": x}) < 1e-6
    if sizes:
        longer = torch.cat([x, x.flip(1), x[:, :4] * 0.01], dim=1)[:1]
        np.testing.assert_allclose(fed(opened, {"x": longer})["output_0"], torch.logcumsumexp(longer, 1), rtol=1e-5)
    half = session(export_onnx(to_half(Running().eval()).module, {"x": x.half()}, dynamic_shapes=sizes))
    assert difference(Running(), half, {"x": x}, half=True) < 1e-3


def test_the_logarithm_of_a_sigmoid_holds_far_from_zero() -> None:
    x = torch.tensor([[-500.0, -30, -15, -1, 0, 1, 30]])
    model = export_onnx(nn.LogSigmoid().eval(), x)
    np.testing.assert_allclose(fed(session(model), {"input": x})["output"], nn.LogSigmoid()(x), rtol=1e-5, atol=1e-12)
    double = session(export_onnx(nn.LogSigmoid().eval(), x.double()))
    np.testing.assert_allclose(fed(double, {"input": x.double()})["output"], nn.LogSigmoid()(x.double()), rtol=1e-5, atol=1e-12)
    half = session(export_onnx(to_half(nn.LogSigmoid().eval()).module, x.half()))
    assert difference(nn.LogSigmoid(), half, {"input": x}, half=True) < 1e-3


@pytest.mark.parametrize("include_self", [True, False])
def test_a_mean_of_what_is_scattered_divides(include_self: bool) -> None:
    inputs = {"x": torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]]), "y": torch.tensor([[10.0, 20, 30], [40, 50, 60]])}
    module = mean_of_places(include_self=include_self)
    assert difference(module, session(export_onnx(module, inputs, dynamic_shapes=())), inputs) < 1e-6


def test_a_mean_of_whole_numbers_is_refused() -> None:
    with pytest.raises(ExportError, match="'mean' of whole numbers"):
        export_onnx(mean_of_places(include_self=True), [torch.ones(2, 4).int(), torch.ones(2, 3).int()], dynamic_shapes=())


def test_a_loss_of_smoothed_labels_is_refused_and_another_is_right() -> None:
    inputs = {"x": torch.tensor([[0.1, 2.0, -1.0], [1.0, 0.0, 3.0]]), "y": torch.tensor([1, 0])}
    weight = torch.tensor([1.0, 2.0, 0.5])
    plain = Calling(nn.CrossEntropyLoss(weight=weight, ignore_index=2)).eval()
    assert difference(plain, session(export_onnx(plain, inputs)), inputs) < 1e-6
    with pytest.raises(ExportError, match="label_smoothing has no form in ONNX"):
        export_onnx(Calling(nn.CrossEntropyLoss(weight=weight, label_smoothing=0.1)).eval(), inputs)


@pytest.mark.parametrize("function", [torch.special.erfcx, torch.special.log_ndtr])
def test_tails_of_the_normal_distribution_hold(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.tensor([[-9.0, -5, -1, -0.1, 0, 0.1, 1, 3, 5, 9, 20, 90, 1e4, math.inf]])
    x = x if function is torch.special.erfcx else -x[:, :-1]
    module = Calling(lambda a, _: function(a)).eval()
    inputs = {"x": x, "y": torch.ones(1)}
    answer = fed(session(export_onnx(module, inputs, dynamic_shapes=())), inputs)["output"]
    np.testing.assert_allclose(answer, function(x), rtol=3e-6, atol=2e-8)
