"""torch.amp.GradScaler's own defects (8 to 12 of the list this room keeps) are absent here."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from amp_core import GradScaler


def parameter_with(gradient: list[float], *, fused: bool = False) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    parameter = nn.Parameter(torch.zeros(len(gradient)))
    parameter.grad = torch.tensor(gradient)
    return parameter, torch.optim.SGD([parameter], lr=1e-3, fused=fused)


def ready(**settings: Any) -> GradScaler:
    scaler = GradScaler("cpu", **settings)
    scaler.scale(torch.ones(()))
    return scaler


def closure() -> Tensor:
    raise AssertionError("a closure ran on scaled losses")


@pytest.mark.parametrize("given_as", ["position", "keyword"])
def test_defect_8_a_closure_is_refused_however_it_is_passed(given_as: str) -> None:
    _, optimizer = parameter_with([1.0])
    scaler = ready()
    with pytest.raises(RuntimeError, match="Closure use is not currently supported.*Use an optimizer that needs no closure"):
        scaler.step(optimizer, closure) if given_as == "position" else scaler.step(optimizer, closure=closure)
    assert scaler.step(optimizer, None) is None  # no closure after all


@pytest.mark.parametrize("fused", [False, True])
def test_defect_9_endless_overflow_neither_exhausts_the_scale_nor_reaches_the_parameters(fused: bool) -> None:
    parameter, optimizer = parameter_with([math.inf], fused=fused)
    scaler = ready()
    for _ in range(300):
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == scaler.min_scale == 2.0**-14
    parameter.grad = torch.ones(1) * scaler.get_scale()
    scaler.step(optimizer)
    torch.testing.assert_close(parameter.detach(), torch.tensor([-1e-3]))


@given(
    gradient=st.lists(st.floats(width=32), min_size=1, max_size=4),
    scale=st.floats(2.0**-14, 2.0**24, width=32),
    fused=st.booleans(),
    explicitly=st.booleans(),
)
def test_defect_9_no_gradient_and_no_scale_writes_a_non_finite_value(
    gradient: list[float], scale: float, fused: bool, explicitly: bool
) -> None:
    parameter, optimizer = parameter_with(gradient, fused=fused)
    scaler = ready(init_scale=scale)
    if explicitly:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert torch.isfinite(parameter).all()
    true_gradient = torch.tensor(gradient) / torch.tensor(scale)
    if torch.isfinite(true_gradient).all():
        torch.testing.assert_close(parameter.detach(), -1e-3 * true_gradient, rtol=1e-5, atol=1e-37)
    else:
        assert scaler.step_was_skipped
        assert torch.equal(parameter.detach(), torch.zeros(len(gradient)))


@pytest.mark.parametrize("new_scale", [2, 2.0, torch.tensor(2.0), torch.tensor([2.0]), torch.tensor([2])])
def test_defect_10_update_takes_any_number(new_scale: float | Tensor) -> None:
    scaler = ready()
    scaler.update(new_scale)
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("new_scale", [0, -1.0, math.nan, math.inf, 2.0**-20, "2", True, torch.ones(2), torch.tensor(math.nan)])
def test_defect_10_update_refuses_what_is_no_scale(new_scale: Any) -> None:
    scaler = ready()
    with pytest.raises(ValueError, match="new_scale must be between min_scale 6.10352e-05 and max_scale 1.70141e.38, got"):
        scaler.update(new_scale)
    assert scaler.get_scale() == 2.0**16


def test_defect_11_an_interval_set_below_the_count_grows_at_the_next_step() -> None:
    parameter, optimizer = parameter_with([1.0])
    scaler = ready(growth_interval=10)
    for _ in range(5):
        scaler.step(optimizer)
        scaler.update()
    scaler.set_growth_interval(2)
    parameter.grad = torch.ones(1)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**17
    state = scaler.state_dict() | {"_growth_tracker": 99, "growth_interval": 3}
    scaler.load_state_dict(state)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**18


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("growth_factor", 1.0, r"The growth factor must be > 1.0 and finite, got 1.0"),
        ("growth_factor", math.inf, "growth factor must be > 1.0"),
        ("growth_factor", math.nan, "growth factor must be > 1.0"),
        ("backoff_factor", 1.0, "The backoff factor must be < 1.0 and > 0.0, got 1.0"),
        ("backoff_factor", 0.0, "backoff factor must be < 1.0"),
        ("growth_interval", 0, "The growth interval must be an integer >= 1, got 0"),
        ("growth_interval", 1.5, "growth interval must be an integer"),
    ],
)
def test_defect_12_settings_are_checked_wherever_they_come_from(setting: str, value: Any, message: str) -> None:
    scaler = GradScaler("cpu")
    before = scaler.state_dict()
    with pytest.raises(ValueError, match=message):
        GradScaler("cpu", **{setting: value})
    with pytest.raises(ValueError, match=message):
        getattr(scaler, f"set_{setting}")(value)
    with pytest.raises(ValueError, match=message):
        scaler.load_state_dict(before | {setting: value})
    assert scaler.state_dict() == before


def test_a_sparse_gradient_whose_duplicates_overflow_together_is_found() -> None:
    embedding = nn.Embedding(3, 1, sparse=True)
    optimizer = torch.optim.SparseAdam(embedding.parameters())
    twice_the_same, values = torch.tensor([[1, 1]]), torch.tensor([[3e38], [3e38]])
    embedding.weight.grad = torch.sparse_coo_tensor(twice_the_same, values, (3, 1), check_invariants=True)
    scaler = ready(init_scale=1.0)
    scaler.step(optimizer)
    assert scaler.step_was_skipped
    assert torch.isfinite(embedding.weight).all()
