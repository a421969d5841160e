"""Defects 8 to 12 of the list, in the same run on torch.amp's class, which must fail, and on ours, which must not."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

from amp_core import GradScaler

has_defect = pytest.mark.xfail(
    raises=(AssertionError, AttributeError, RuntimeError), reason="torch.amp.GradScaler has this defect"
)
kinds = [GradScaler, pytest.param(torch.amp.GradScaler, marks=has_defect)]
both = pytest.mark.parametrize("kind", kinds, ids=["ours", "torch's"])


def training(kind: Any, gradient: float = 1.0, **settings: Any) -> tuple[Any, nn.Parameter, torch.optim.Optimizer]:
    """A scaler in the middle of an iteration, and an optimizer with a gradient."""
    scaler = kind("cpu", **settings)
    scaler.scale(torch.zeros(()))
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.full((1,), gradient)
    return scaler, parameter, torch.optim.SGD([parameter], lr=1e-3)


@both
def test_defect_8_a_closure_given_by_position_never_runs_on_scaled_losses(kind: Any) -> None:
    scaler, parameter, optimizer = training(kind)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = scaler.scale((parameter - 1).square().sum())
        loss.backward()
        assert isinstance(loss, torch.Tensor)
        return loss

    refused = False
    try:
        scaler.step(optimizer, closure)
    except RuntimeError:
        refused = True
    assert refused
    assert parameter.item() == 0.0


@both
@pytest.mark.filterwarnings("ignore:.*smallest scale")
def test_defect_9_endless_overflow_does_not_end_in_the_parameters(kind: Any) -> None:
    scaler, parameter, optimizer = training(kind, math.inf)
    for _ in range(200):
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() > 0.0
    parameter.grad = torch.zeros(1)
    scaler.step(optimizer)
    assert torch.isfinite(parameter).all()


@both
@pytest.mark.parametrize("new_scale", [2, torch.tensor([4.0], dtype=torch.float64)])
def test_defect_10_update_takes_a_number_of_any_kind(kind: Any, new_scale: Any) -> None:
    scaler, _, _ = training(kind)
    scaler.update(new_scale)
    assert scaler.get_scale() == float(new_scale)


@both
def test_defect_11_growth_goes_on_when_the_interval_is_set_below_the_count(kind: Any) -> None:
    scaler, _, optimizer = training(kind, growth_interval=100)
    for _ in range(10):
        scaler.step(optimizer)
        scaler.update()
    scaler.set_growth_interval(5)
    for _ in range(5):
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() > 2.0**16


@both
@pytest.mark.parametrize(("setting", "value"), [("growth_factor", 0.5), ("backoff_factor", 2.0)])
def test_defect_12_setters_refuse_what_the_constructor_refuses(kind: Any, setting: str, value: float) -> None:
    scaler, _, _ = training(kind)
    before = getattr(scaler, f"get_{setting}")()
    with pytest.raises((AssertionError, ValueError)):
        kind("cpu", **{setting: value})
    with suppress(ValueError):
        getattr(scaler, f"set_{setting}")(value)
    assert getattr(scaler, f"get_{setting}")() == before
