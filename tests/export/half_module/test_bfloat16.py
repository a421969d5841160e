"""`to_half(dtype="bfloat16")`: what bfloat16 holds and what it does not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from halfserve.export.export_errors import UsageError
from halfserve.export.half_module.to_half import to_half
from halfserve.export.half_types import BF16
from tests.export import models


class Table(nn.Module):
    """Buffers that half precision cannot hold, in a submodule."""

    def __init__(self, **buffers: torch.Tensor) -> None:
        super().__init__()
        for name, values in buffers.items():
            self.register_buffer(name, values)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for values in self.buffers():
            x = x + values
        return x


def actions(module: nn.Module) -> dict[str, str]:
    return {tensor.name: tensor.action for tensor in to_half(module, dtype="bfloat16").report.tensors}


def test_a_module_computes_in_bfloat16() -> None:
    module, x = models.cnn(), torch.rand(4, 1, 8, 8)
    half = to_half(module, dtype="bfloat16").module
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    y = half(x.bfloat16())
    expected = module(x)
    assert y.dtype == torch.bfloat16
    assert (y.float() - expected).abs().max() <= 0.04 * expected.abs().max()


def test_large_and_tiny_weights_are_rounded_as_any_others() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).eval()
    with torch.no_grad():
        module[0].weight.fill_(1e9)  # type: ignore[operator]  # (a Linear's)
        module[1].weight.fill_(1e-20)  # type: ignore[operator]  # (as above)
    assert set(actions(module).values()) == {"halved"}


def test_counters_over_256_stay_float32_and_results_are_bfloat16() -> None:
    module = nn.Sequential(nn.Linear(4, 4), Table(steps=torch.arange(300.0)[-4:])).eval()
    result = to_half(module, dtype="bfloat16")
    (kept,) = [tensor for tensor in result.report.tensors if tensor.action == "kept"]
    assert (kept.name, kept.reason) == ("1.steps", "whole numbers over 256, which bfloat16 cannot tell apart")
    assert result.module(torch.rand(2, 4).bfloat16()).dtype == torch.bfloat16


def test_a_mask_of_the_smallest_float32_stays_finite() -> None:
    module = nn.Sequential(nn.Linear(2, 2), Table(mask=torch.tensor([0.0, torch.finfo(torch.float32).min]))).eval()
    result = to_half(module, dtype="bfloat16")
    assert {tensor.name: tensor.action for tensor in result.report.tensors}["1.mask"] == "saturated"
    assert result.module.get_buffer("1.mask").min().item() == -BF16.largest


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(UsageError, match="dtype is 'int8'; expected 'float16' or 'bfloat16'"):
        to_half(nn.Linear(2, 2), dtype="int8")  # type: ignore[arg-type]
