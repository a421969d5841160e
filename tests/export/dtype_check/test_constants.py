from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from halfserve.export.dtype_check.constants import NOTABLE_ERROR
from halfserve.export.dtype_check.finder import find_dtype_leaks
from halfserve.export.dtype_check.findings import LeakReport
from halfserve.export.half_types import FP16_OVERFLOW


class Adding(nn.Module):
    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return x.abs() + self.number


def found(model: nn.Module) -> LeakReport:
    return find_dtype_leaks(model, torch.ones(1, 4))


@settings(max_examples=15, deadline=None)
@given(exponent=st.floats(-14, 8), sign=st.sampled_from([-1, 1]))
def test_a_constant_is_reported_exactly_when_rounding_changes_it_much(exponent: float, sign: int) -> None:
    number = sign * 10**exponent
    held = float(torch.tensor(number, dtype=torch.float64).half())
    kinds = [
        finding.kind for finding in found(Adding(number)).findings if finding.severity != "note" and finding.kind != "overflow"
    ]
    if math.isinf(held):
        assert kinds == ["constant"]
    elif held == 0 or (abs(number) < 2**-14 and abs(held - number) > NOTABLE_ERROR * abs(number)):
        assert kinds == ["epsilon"]
    else:
        assert kinds == []


def test_the_first_infinite_number_is_where_rounding_says() -> None:
    edge = torch.tensor(FP16_OVERFLOW, dtype=torch.float64)
    assert edge.half().isinf()
    assert (edge - 1).half() == 65504


def test_a_mildly_subnormal_number_is_a_note() -> None:
    report = found(Adding(1e-5))
    assert report.clean
    assert "1e-05 is subnormal in float16: 1.00136e-05" in report.notes[0].symptom


def test_minus_infinity_as_a_mask_is_a_note() -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.masked_fill(x > 1, float("-inf")).softmax(-1)

    report = found(Masked())
    assert report.clean
    assert [(note.kind, note.fix) for note in report.notes] == [("infinite_mask", "mask_value(x)")]


@pytest.mark.parametrize("number", [0.0, 1.0, -1e4, 65504.0, 6.2e-5, float("inf")])
def test_what_float16_holds_is_not_mentioned(number: float) -> None:
    assert found(Adding(number)).findings == ()


def test_numbers_beside_float32_tensors_are_not_judged() -> None:
    class Careful(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.float() + 1e-12).rsqrt().clamp(max=1e9).to(x.dtype)

    assert found(Careful()).findings == ()


class FullMask(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x + torch.full((x.shape[-1],), -1e9)).softmax(-1)


class FilledMask(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(x.shape[-1]).masked_fill(x[0] > 1, -1e9)  # nowhere, with these inputs
        return (x + mask[None]).softmax(-1)


class ScaledMask(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x + (1 - torch.ones(x.shape[-1])) * -1e9).softmax(-1)


class ChosenMask(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x + torch.where(x[0] > 1, -1e9, 0.0)).softmax(-1)


@pytest.mark.parametrize("model", [FullMask(), FilledMask(), ScaledMask(), ChosenMask()])
def test_a_number_in_a_tensor_that_should_be_float16_is_told_in_the_same_call(model: nn.Module) -> None:
    report = found(model)
    assert [(error.kind, error.fix) for error in report.errors] == [("constant", "mask_value(x)")]
    assert "-1e+09 does not fit float16 (largest 65504), which this tensor becomes" in report.errors[0].symptom
    assert [warning.kind for warning in report.warnings] in (["factory"], ["numbers"])


def test_a_number_in_scores_that_are_float32_on_purpose_is_fine() -> None:
    class Upcast(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.float().masked_fill(x > 1, -1e9).softmax(-1).to(x.dtype)

    assert found(Upcast()).findings == ()
