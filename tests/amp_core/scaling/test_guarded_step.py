"""float16 gradients by opt-in, and steps that are undone because they would have broken a parameter."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from amp_core import GradScaler
from tests.amp_core.scaling.iteration import parameter_with, ready


def half_parameter(gradient: list[float]) -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(len(gradient), dtype=torch.float16))
    parameter.grad = torch.tensor(gradient, dtype=torch.float16)
    return parameter


@pytest.mark.parametrize("fused", [False, True])
def test_float16_gradients_are_refused_unless_allowed_and_nothing_changes(fused: bool) -> None:
    parameter = half_parameter([4.0])
    optimizer, scaler = torch.optim.SGD([parameter], lr=0.1, fused=fused), ready(init_scale=2.0)
    for call in (scaler.step, scaler.unscale_):
        with pytest.raises(ValueError, match=r"Attempting to unscale FP16 gradients\. Keep the.*allow_fp16_gradients=True"):
            call(optimizer)
    assert parameter.grad is not None
    assert (parameter.item(), parameter.grad.item(), len(scaler._per_optimizer_states)) == (1.0, 4.0, 0)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("explicitly", [False, True])
def test_allowed_they_are_unscaled_in_place(fused: bool, explicitly: bool) -> None:
    parameter = half_parameter([4.0, -2048.0])
    optimizer = torch.optim.SGD([parameter], lr=0.5, fused=fused)
    scaler = ready(init_scale=1024.0, allow_fp16_gradients=True)
    if explicitly:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert parameter.tolist() == torch.tensor([1.0 - 2.0 / 1024, 2.0], dtype=torch.float16).tolist()


@pytest.mark.parametrize("gradient", [math.inf, math.nan, 65504.0])
def test_what_overflows_or_overflows_by_unscaling_is_skipped(gradient: float) -> None:
    parameter = half_parameter([gradient])
    scaler = ready(init_scale=0.5, allow_fp16_gradients=True)
    scaler.step(torch.optim.SGD([parameter], lr=1e-6))
    assert (scaler.step_was_skipped, parameter.item()) == (True, 1.0)
    scaler.update()
    assert scaler.get_scale() == 0.25


@pytest.mark.parametrize("overflows", [None, 0, 1, 2])
def test_gradients_of_several_dtypes_are_unscaled_together_or_skipped_together(overflows: int | None) -> None:
    # As of a halved model whose norms stay float32.
    parameters = [nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.float32, torch.float16, torch.float32)]
    for place, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, math.inf if place == overflows else 4.0)
    scaler = ready(init_scale=4.0, allow_fp16_gradients=True)
    scaler.step(torch.optim.SGD(parameters, lr=0.25))
    skipped = overflows is not None
    assert scaler.step_was_skipped is skipped
    assert [parameter.tolist() for parameter in parameters] == [[1.0 if skipped else 0.75] * 2] * 3


def test_a_half_model_trains() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1).half()
    x = torch.randn(64, 4).half()
    y = x.sum(1, keepdim=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=128.0, allow_fp16_gradients=True)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        torch.autograd.backward(scaler.scale(loss))
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 10


def test_an_eps_that_is_zero_in_float16_is_caught() -> None:
    parameter = half_parameter([0.0])
    optimizer = torch.optim.Adam([("w", parameter)], lr=0.1, foreach=False)  # 0 / (sqrt(0) + 1e-8) is 0 / 0 in float16
    scaler = ready(allow_fp16_gradients=True)
    with pytest.warns(
        RuntimeWarning, match=r"The step of Adam made w non-finite out of finite gradients, so it was undone"
    ) as told:
        scaler.step(optimizer)
    assert told[0].filename == __file__
    assert (parameter.item(), scaler.step_was_skipped, scaler.overflowed_parameters()) == (1.0, True, ["w"])
    scaler.update()
    assert scaler.get_scale() == 2.0**16  # the scale is not to blame
    assert (scaler.history[0].skipped, scaler.history[0].overflowed) == (True, ("w",))


@pytest.mark.parametrize("fused", [False, True])
def test_a_guarded_step_is_undone_with_the_optimizers_state(fused: bool) -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=10.0, momentum=0.9, fused=fused)
    scaler = ready(init_scale=1.0, guard_parameters=True)
    for step, gradient in enumerate((1.0, 3e38, 1.0)):
        before = copy.deepcopy(optimizer.state_dict()["state"])
        value = parameter.detach().clone()
        parameter.grad = torch.full((2,), gradient)
        if step == 1:
            with pytest.warns(RuntimeWarning, match="Lower the learning rate or clip the gradients"):
                scaler.step(optimizer)
            torch.testing.assert_close(optimizer.state_dict()["state"], before, rtol=0, atol=0)
            assert torch.equal(parameter, value)
        else:
            scaler.step(optimizer)
        assert scaler.skipped(optimizer) is (step == 1)
        scaler.update()
    assert torch.isfinite(parameter).all()


def test_what_an_optimizer_keeps_in_its_groups_is_undone_too() -> None:
    class Counts(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.param_groups[0]["steps"] += 1  # as schedule-free optimizers do
            return super().step(closure)

    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.full((1,), 3e38)
    optimizer = Counts([{"params": [parameter], "steps": 7}], lr=10.0)
    with pytest.warns(RuntimeWarning, match="so it was undone"):
        ready(init_scale=1.0, guard_parameters=True).step(optimizer)
    assert (parameter.item(), optimizer.param_groups[0]["steps"]) == (1.0, 7)


def test_unguarded_a_step_is_torchs() -> None:
    ours, optimizer = parameter_with([3e38])
    optimizer.param_groups[0]["lr"] = 10.0
    ready(init_scale=1.0).step(optimizer)
    assert ours.item() == -math.inf


def test_a_parameter_that_was_broken_before_is_not_blamed_on_the_step() -> None:
    parameter, optimizer = parameter_with([1.0])
    with torch.no_grad():
        parameter.fill_(math.nan)
    scaler = ready(guard_parameters=True)
    scaler.step(optimizer)
    assert not scaler.step_was_skipped


def test_an_optimizer_that_fails_leaves_a_guarded_step_undone() -> None:
    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step()
            raise OSError("disk")

    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    with pytest.raises(OSError, match="disk"):
        ready(guard_parameters=True).step(Fails([parameter], lr=0.5))
    assert parameter.item() == 1.0
