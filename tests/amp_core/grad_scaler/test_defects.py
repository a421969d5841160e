"""Defects of torch.amp.GradScaler that ours does not have."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from halfserve import GradScaler
from halfserve.amp_core.grad_scaler.optimizers import must_not_skip_itself
from tests.amp_core.grad_scaler.iteration import iterate, parameter_with, ready


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


@pytest.mark.parametrize("new_scale", [0, -1.0, math.nan, math.inf, 2.0**-20, "2", True, torch.ones(2), torch.tensor(math.nan)])
def test_defect_10_update_refuses_what_is_no_scale(new_scale: Any) -> None:
    scaler = ready()
    with pytest.raises(ValueError, match="new_scale must be between min_scale 6.10352e-05 and max_scale 1.70141e.38, got"):
        scaler.update(new_scale)
    assert scaler.get_scale() == 2.0**16


def test_update_refuses_a_tensor_that_requires_a_gradient_as_torch_does() -> None:
    scaler = ready()
    with pytest.raises(ValueError, match=r"new_scale must be a number or a tensor that requires no gradient.*\.detach\(\)"):
        scaler.update(torch.tensor(2.0, requires_grad=True))
    assert scaler.get_scale() == 2.0**16


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
    assert scaler.overflowed_parameters(embedding) == ["weight"]
    assert torch.isfinite(embedding.weight).all()


@pytest.mark.parametrize("explicitly", [False, True])
def test_a_fused_sgd_whose_first_step_is_skipped_has_no_momentum_of_garbage(explicitly: bool) -> None:
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.5, fused=True)
    scaler = ready(init_scale=1.0)
    for gradient in (math.inf, 1.0, 1.0):
        parameter.grad = torch.full((3,), gradient)
        if explicitly:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update(1.0)
        if gradient == math.inf:
            assert not optimizer.state  # torch leaves memory here that nobody has written
    assert parameter.tolist() == [-2.5] * 3


def test_such_an_optimizer_is_known_before_its_momentum_is_there_and_no_longer_after() -> None:
    parameter, frozen = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    for momentum in (0.0, 0.5):
        optimizer = torch.optim.SGD([parameter, frozen], lr=1.0, momentum=momentum, fused=True)
        assert must_not_skip_itself(optimizer) is (momentum != 0.0)
        optimizer.step()
        assert not must_not_skip_itself(optimizer)
    assert not must_not_skip_itself(torch.optim.Adam([parameter], fused=True))


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
        iterate(scaler, optimizer, parameter, math.inf)
    assert scaler.get_scale() > 0.0
    assert scaler.get_scale() == scaler.min_scale == 2.0**-14
    iterate(scaler, optimizer, parameter, 0.0)
    assert torch.isfinite(parameter).all()


@pytest.mark.parametrize(
    ("kind", "new_scale"),
    [
        *((GradScaler, scale) for scale in (2, 2.0, torch.tensor(2.0), torch.tensor([2.0]), torch.tensor([2]))),
        pytest.param(torch.amp.GradScaler, 2, marks=has_defect),
        pytest.param(torch.amp.GradScaler, torch.tensor([2.0], dtype=torch.float64), marks=has_defect),
    ],
)
def test_defect_10_update_takes_a_number_of_any_kind(kind: Any, new_scale: Any) -> None:
    scaler, _, _ = training(kind)
    scaler.update(new_scale)
    assert scaler.get_scale() == 2.0


@both
def test_defect_11_an_interval_below_the_count_grows_at_the_next_step(kind: Any) -> None:
    scaler, parameter, optimizer = training(kind, growth_interval=10)
    for _ in range(5):
        iterate(scaler, optimizer, parameter, 1.0)
    scaler.set_growth_interval(2)
    iterate(scaler, optimizer, parameter, 1.0)
    assert scaler.get_scale() == 2.0**17
    scaler.load_state_dict(scaler.state_dict() | {"_growth_tracker": 99, "growth_interval": 3})
    iterate(scaler, optimizer, parameter, 1.0)
    assert scaler.get_scale() == 2.0**18


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
