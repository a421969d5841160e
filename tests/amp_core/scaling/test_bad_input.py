"""Calls out of order, foreign states and wrong settings: one clear error, and nothing has changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from amp_core import GradScaler
from tests.amp_core.scaling.iteration import backward, iterate, model_and_optimizer, parameter_with, ready

Call = Callable[[GradScaler, torch.optim.Optimizer], Any]
UNSCALED, STEPPED = ("unscale_",), ("step",)
CASES: dict[str, tuple[tuple[str, ...], Call, str]] = {
    "unscale_ twice": (UNSCALED, lambda s, o: s.unscale_(o), r"unscale_\(\) has already been called on this optimizer since"),
    "unscale_ after step": (STEPPED, lambda s, o: s.unscale_(o), r"unscale_\(\) is being called after step\(\)"),
    "step twice": (STEPPED, lambda s, o: s.step(o), r"step\(\) has already been called since the last update\(\)"),
    "update before step": ((), lambda s, o: s.update(), r"No inf checks were recorded prior to update: call scaler\.step"),
    "pickle in between": (UNSCALED, lambda s, o: copy.deepcopy(s), "may only be pickled at the beginning of an iteration"),
}


def everything(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> Any:
    states = {key: (value["stage"], list(value["found_inf_per_device"])) for key, value in scaler._per_optimizer_states.items()}
    parameters = [(p.tolist(), None if p.grad is None else p.grad.tolist()) for p in optimizer.param_groups[0]["params"]]
    return scaler.state_dict(), states, parameters, scaler.step_was_skipped, scaler.overflowed_parameters(), scaler.history


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_call_out_of_order_changes_nothing(case: str, fused: bool) -> None:
    before, call, message = CASES[case]
    _, optimizer = parameter_with([1.0, 2.0], fused=fused)
    scaler = ready()
    for method in before:
        getattr(scaler, method)(optimizer)
    state = everything(scaler, optimizer)
    with pytest.raises(RuntimeError, match=message):
        call(scaler, optimizer)
    assert everything(scaler, optimizer) == state


@pytest.mark.parametrize("method", ["step", "unscale_", "update"])
def test_nothing_works_before_a_loss_was_scaled(method: str) -> None:
    _, optimizer = parameter_with([1.0])
    scaler = GradScaler("cpu")
    arguments = () if method == "update" else (optimizer,)
    with pytest.raises(
        RuntimeError, match=rf"Attempted {method} but _scale is None: call scaler\.scale\(loss\)\.backward\(\) earlier"
    ):
        getattr(scaler, method)(*arguments)
    assert scaler._scale is None
    assert len(scaler._per_optimizer_states) == 0


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("explicitly", [False, True])
def test_an_optimizer_without_gradients_is_an_error_that_forgets_nothing(fused: bool, explicitly: bool) -> None:
    model, optimizer = model_and_optimizer(fused=fused)
    scaler = GradScaler("cpu")
    backward(scaler, model, overflow_in="0.bias")
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if explicitly:
        scaler.unscale_(optimizer)  # as torch's: clipping helpers unscale whatever there is
    state = everything(scaler, optimizer)
    with pytest.raises(
        RuntimeError, match="No inf checks were recorded for this optimizer: none of its parameters has a gradient"
    ):
        scaler.step(optimizer)
    assert everything(scaler, optimizer) == state
    assert scaler.overflowed_parameters(model) == ["0.bias"]


FOREIGN: list[tuple[Any, type[Exception], str]] = [
    ({}, RuntimeError, "The source state dict is empty, possibly because it was saved from a disabled GradScaler"),
    (
        nn.Linear(1, 1).state_dict(),
        RuntimeError,
        r"The source state dict lacks _growth_tracker, backoff_factor, .*expected what",
    ),
    ([1, 2], RuntimeError, r"The source state dict is a list; expected what GradScaler\.state_dict\(\) returns"),
    (None, RuntimeError, "The source state dict is a NoneType; expected"),
    ({"scale": -1.0}, ValueError, "the loaded scale must be between min_scale 6.10352e-05 and max_scale 1.70141e.38, got -1.0"),
    ({"scale": "big"}, ValueError, "the loaded scale must be between .*, got 'big'"),
    ({"_growth_tracker": -1}, ValueError, "the loaded _growth_tracker must be an integer >= 0, got -1"),
    ({"_growth_tracker": None}, ValueError, "the loaded _growth_tracker must be an integer >= 0, got None"),
    ({"backoff_factor": 2.0}, ValueError, r"The backoff factor must be < 1\.0 and > 0\.0, got 2\.0"),
    ({"growth_factor": None}, ValueError, "The growth factor must be > 1.0 and finite, got None"),
]


@pytest.mark.parametrize(("state", "error", "message"), FOREIGN)
def test_a_foreign_state_is_refused_and_nothing_changes(state: Any, error: type[Exception], message: str) -> None:
    parameter, optimizer = parameter_with([0.0])
    scaler = ready(init_scale=8.0, growth_interval=9)
    iterate(scaler, optimizer, parameter, 1.0)
    before = scaler.state_dict()
    if isinstance(state, dict) and state.keys() <= before.keys() and state:
        state = {"scale": 2.0, "growth_factor": 4.0, "backoff_factor": 0.1, "growth_interval": 5, "_growth_tracker": 2} | state
    with pytest.raises(error, match=message):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == before


@pytest.mark.parametrize("device", ["gpu", "", "cuda0", 3.5, "float16"])
def test_a_wrong_device_type_is_refused(device: Any) -> None:
    with pytest.raises(ValueError, match="device must be the name of a device type, such as 'cuda' or 'cpu', got"):
        GradScaler(device)


def test_a_device_stands_for_its_type() -> None:
    assert GradScaler(torch.device("cpu"))._device == GradScaler("cpu:0")._device == "cpu"


def test_an_update_to_an_impossible_scale_ends_no_iteration() -> None:
    _, optimizer = parameter_with([1.0])
    scaler = ready()
    scaler.step(optimizer)
    state = everything(scaler, optimizer)
    with pytest.raises(ValueError, match="new_scale must be between"):
        scaler.update(0.0)
    assert everything(scaler, optimizer) == state
    scaler.update()
    assert len(scaler.history) == 1
