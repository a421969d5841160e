"""The history tells what happened, is bounded, and costs no waiting."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from amp_core import GradScaler
from amp_core.scaling.history import History, ScaleRecord
from amp_core.scaling.optimizer_state import FOUND
from amp_core.scaling.step_outcomes import StepOutcomes
from tests.amp_core.scaling.iteration import backward, iterate, model_and_optimizer, parameter_with, ready


@pytest.mark.parametrize("fused", [False, True])
def test_it_tells_scale_and_skips_with_names(fused: bool) -> None:
    model, optimizer = model_and_optimizer(fused=fused, named=True)
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1)
    for overflow_in in (None, "1.bias", None):
        backward(scaler, model, overflow_in=overflow_in)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.history == [
        ScaleRecord(step=1, scale=8.0, skipped=False),
        ScaleRecord(step=2, scale=16.0, skipped=True, overflowed=("1.bias",)),
        ScaleRecord(step=3, scale=8.0, skipped=False),
    ]


def test_setting_the_scale_is_an_iteration_too() -> None:
    _, optimizer = parameter_with([math.inf])
    scaler = ready(init_scale=8.0)
    scaler.step(optimizer)
    scaler.update(4.0)
    scaler.update(2.0)
    assert [(record.scale, record.skipped) for record in scaler.history] == [(8.0, True), (4.0, False)]


@pytest.mark.parametrize(("size", "kept"), [(0, []), (2, [4, 5]), (9, [1, 2, 3, 4, 5])])
def test_it_keeps_the_last_iterations(size: int, kept: list[int]) -> None:
    parameter, optimizer = parameter_with([0.0])
    scaler = ready(history_size=size)
    for _ in range(5):
        iterate(scaler, optimizer, parameter, 1.0)
    assert [record.step for record in scaler.history] == kept


def test_a_copy_goes_on_with_it() -> None:
    parameter, optimizer = parameter_with([0.0])
    scaler = ready()
    iterate(scaler, optimizer, parameter, math.inf)
    twin = copy.deepcopy(scaler)
    twin.scale(torch.ones(()))
    iterate(twin, optimizer, parameter, 1.0)
    assert twin.history[:1] == scaler.history
    assert twin.history[1] == ScaleRecord(step=2, scale=2.0**15, skipped=False)


def test_what_only_the_device_knows_is_read_when_asked_for() -> None:
    # Tensors in place of numbers, as a fused optimizer on an accelerator leaves them.
    history, _, optimizer = History(4), *parameter_with([1.0])

    class OnDevice(StepOutcomes):
        pass

    for found in (1.0, 0.0):
        outcomes = OnDevice()
        outcome = outcomes.note(optimizer, {FOUND: {}}, look_now=False)
        outcome.state[FOUND] = {torch.device("meta"): torch.zeros((), device="meta")}
        history.add(torch.tensor(4.0), outcomes.of_this_iteration(), torch.tensor(found))
    assert history.records() == [ScaleRecord(step=1, scale=4.0, skipped=True), ScaleRecord(step=2, scale=4.0, skipped=False)]
    assert history.records() == history.records()


@pytest.mark.parametrize("value", [-1, 1.5, None])
def test_an_impossible_size_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="history_size must be an integer >= 0, got"):
        GradScaler("cpu", history_size=value)
