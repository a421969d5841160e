"""Hysteresis lets the first overflows pass, by Megatron-LM's rule, on the device and through a checkpoint."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amp_core import GradScaler
from tests.amp_core.scaling.iteration import iterate, parameter_with, ready


@dataclass
class Rule:
    """The docstring's rule once more, in plain numbers."""

    times: int
    interval: int
    scale: float = 2.0**16
    clean: int = 0
    overflows: int = 0

    def step(self, *, overflow: bool) -> None:
        if overflow:
            self.clean, self.overflows = 0, self.overflows + 1
            if self.overflows >= self.times:
                self.scale = max(self.scale / 2, 2.0**-14)
            return
        self.clean += 1
        if self.clean == self.interval:
            self.scale, self.clean, self.overflows = self.scale * 2, 0, 0


def observed(scaler: Any) -> tuple[float, int]:
    return scaler.get_scale(), scaler._growth_tracker.item()


@given(st.integers(1, 4), st.integers(1, 4), st.lists(st.booleans(), max_size=40))
def test_it_follows_the_rule_whatever_overflows(times: int, interval: int, overflows: list[bool]) -> None:
    parameter, optimizer = parameter_with([0.0])
    scaler = ready(hysteresis=times, growth_interval=interval, on_min_scale="stop")
    rule = Rule(times, interval)
    for overflow in overflows:
        iterate(scaler, optimizer, parameter, math.inf if overflow else 1.0)
        rule.step(overflow=overflow)
        assert observed(scaler) == (rule.scale, rule.clean)
        assert scaler.step_was_skipped is overflow


@given(st.integers(1, 3), st.lists(st.sampled_from([0.0, 1.0, math.inf, math.nan]), max_size=25))
def test_a_hysteresis_of_one_is_torchs(interval: int, gradients: list[float]) -> None:
    parameter, optimizer = parameter_with([0.0])
    ours = ready(hysteresis=1, growth_interval=interval)
    torchs = torch.amp.GradScaler("cpu", growth_interval=interval)
    torchs.scale(torch.ones(()))
    for gradient in gradients:
        iterate(ours, optimizer, parameter, gradient)
        iterate(torchs, optimizer, parameter, gradient)
        assert observed(ours) == observed(torchs)


def test_overflows_one_by_one_add_up() -> None:
    parameter, optimizer = parameter_with([0.0])
    scaler, scales = ready(hysteresis=3, growth_interval=100), []
    for gradient in (math.inf, 1.0, math.inf, 1.0, 1.0, math.inf, 1.0, math.inf):
        iterate(scaler, optimizer, parameter, gradient)
        scales.append(math.log2(scaler.get_scale()))
    assert scales == [16, 16, 16, 16, 16, 15, 15, 14]


@pytest.mark.parametrize("when", ["before the first loss", "after it"])
def test_the_count_goes_through_a_checkpoint(when: str) -> None:
    parameter, optimizer = parameter_with([0.0])
    scaler = ready(hysteresis=3)
    iterate(scaler, optimizer, parameter, math.inf)
    iterate(scaler, optimizer, parameter, math.inf)
    state = scaler.state_dict()
    assert (state["hysteresis"], state["_hysteresis_left"]) == (3, 1)
    other = GradScaler("cpu") if when == "before the first loss" else ready()
    other.load_state_dict(state)
    assert other.hysteresis == 3
    for resumed in (scaler, copy.deepcopy(scaler), other):
        resumed.scale(torch.ones(()))
        iterate(resumed, optimizer, parameter, math.inf)
        assert resumed.get_scale() == 2.0**15


def test_torch_takes_a_state_with_hysteresis_and_the_other_way_round() -> None:
    parameter, optimizer = parameter_with([0.0])
    scaler, torchs = ready(hysteresis=2), torch.amp.GradScaler("cpu", init_scale=8.0)
    iterate(scaler, optimizer, parameter, math.inf)
    torchs.load_state_dict(scaler.state_dict())
    assert torchs.state_dict().items() <= scaler.state_dict().items()
    torchs.load_state_dict(torch.amp.GradScaler("cpu", init_scale=8.0).state_dict())
    scaler.load_state_dict(torchs.state_dict())
    assert (scaler.get_scale(), scaler.hysteresis, scaler.state_dict()["_hysteresis_left"]) == (8.0, 2, 2)


@pytest.mark.parametrize(("key", "value"), [("hysteresis", 0), ("hysteresis", 1.5), ("_hysteresis_left", -1)])
def test_a_state_with_an_impossible_count_is_refused(key: str, value: Any) -> None:
    scaler = ready(hysteresis=2)
    before = scaler.state_dict()
    with pytest.raises(ValueError, match=f"the loaded {key} must be an integer >= "):
        scaler.load_state_dict(before | {"scale": 4.0, key: value})
    assert scaler.state_dict() == before


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2"])
def test_an_impossible_hysteresis_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="hysteresis must be an integer >= 1, got"):
        GradScaler("cpu", hysteresis=value)
