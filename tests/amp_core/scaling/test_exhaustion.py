"""An overflow at the smallest scale is told, by name, in the way that was chosen."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from amp_core import GradScaler
from tests.amp_core.scaling.iteration import backward, iterate, model_and_optimizer, parameter_with, ready

MESSAGE = (
    "The gradients of group 0, parameter 0 are not finite even at the smallest scale, 4: no scale can help. "
    "Look for NaN in the data and the loss; try bfloat16, a lower learning rate, "
    "or an autocast policy that keeps the overflowing operations in float32"
)
EXACTLY = f"^{re.escape(MESSAGE)}$"
SMALL: dict[str, Any] = {"init_scale": 8.0, "min_scale": 4.0, "growth_interval": 1}


@pytest.mark.parametrize("fused", [False, True])
def test_it_warns_once_until_the_scale_has_grown_again(fused: bool) -> None:
    parameter, optimizer = parameter_with([0.0], fused=fused)
    scaler = ready(**SMALL)
    iterate(scaler, optimizer, parameter, math.inf)  # from 8 to 4
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match=EXACTLY):
            iterate(scaler, optimizer, parameter, math.inf)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            iterate(scaler, optimizer, parameter, math.inf)
            iterate(scaler, optimizer, parameter, 1.0)  # from 4 to 8
            iterate(scaler, optimizer, parameter, math.inf)
    assert not scaler.should_stop


def test_the_warning_points_at_the_users_line() -> None:
    _, optimizer = parameter_with([math.inf])
    scaler = ready(init_scale=4.0, min_scale=4.0)
    scaler.step(optimizer)
    with pytest.warns(RuntimeWarning) as told:
        scaler.update()
    assert told[0].filename == __file__


def test_it_raises_with_the_iteration_ended() -> None:
    parameter, optimizer = parameter_with([0.0])
    scaler = ready(**SMALL | {"init_scale": 4.0}, on_min_scale="raise")
    with pytest.raises(FloatingPointError, match=EXACTLY):
        iterate(scaler, optimizer, parameter, math.nan)
    assert scaler.step_was_skipped
    assert scaler.get_scale() == 4.0
    iterate(scaler, optimizer, parameter, 1.0)
    assert (scaler.step_was_skipped, scaler.get_scale()) == (False, 8.0)


def test_it_sets_a_flag_that_stays() -> None:
    parameter, optimizer = parameter_with([0.0])
    scaler = ready(**SMALL, on_min_scale="stop")
    seen = []
    for gradient in (math.inf, math.inf, 1.0):
        iterate(scaler, optimizer, parameter, gradient)
        seen.append(scaler.should_stop)
    assert seen == [False, True, True]


def test_the_parameters_of_every_optimizer_are_named() -> None:
    scaler = ready(init_scale=1.0, min_scale=1.0, on_min_scale="raise")
    for overflow_in in ("1.weight", None, "0.bias"):
        model, optimizer = model_and_optimizer(named=True)
        backward(scaler, model, overflow_in=overflow_in)
        scaler.step(optimizer)
    with pytest.raises(FloatingPointError, match=r"The gradients of 1\.weight, 0\.bias are not finite"):
        scaler.update()


def test_many_parameters_are_counted_not_listed() -> None:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(5)]
    for parameter in parameters:
        parameter.grad = torch.full((1,), math.nan)
    scaler = ready(init_scale=1.0, min_scale=1.0, on_min_scale="raise")
    scaler.step(torch.optim.SGD([(f"p{i}", p) for i, p in enumerate(parameters)], lr=1.0))
    with pytest.raises(FloatingPointError, match="The gradients of p0, p1, p2 and 2 more are not finite"):
        scaler.update()


@pytest.mark.parametrize("value", ["ignore", "", None, True])
def test_any_other_action_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="on_min_scale must be 'warn', 'raise' or 'stop', got"):
        GradScaler("cpu", on_min_scale=value)
