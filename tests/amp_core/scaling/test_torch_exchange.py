"""GradScaler exchanges states with torch.amp.GradScaler, and has its names."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING

import pytest
import torch

from amp_core import GradScaler

if TYPE_CHECKING:
    from collections.abc import Callable


def test_states_are_exchangeable_both_ways() -> None:
    ours, torchs = GradScaler("cpu", 8.0, 3.0, 0.25, 7), torch.amp.GradScaler("cpu", 32.0)
    assert ours.state_dict() == torch.amp.GradScaler("cpu", 8.0, 3.0, 0.25, 7).state_dict()
    torchs.load_state_dict(ours.state_dict())
    assert torchs.state_dict() == ours.state_dict()
    other = torch.amp.GradScaler("cpu", 64.0, 4.0, 0.125, 9)
    other._growth_tracker = None
    other._init_growth_tracker = 5
    ours.load_state_dict(other.state_dict())
    assert ours.state_dict() == other.state_dict()
    assert ours.state_dict()["_growth_tracker"] == 5
    ours.scale(torch.ones(()))
    assert ours.state_dict() == other.state_dict()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])  # noqa: S301  (its own)
def test_a_copy_goes_on_where_the_original_is(duplicate: Callable[[GradScaler], GradScaler]) -> None:
    scaler = GradScaler("cpu", 8.0, growth_interval=2)
    scaler.scale(torch.ones(()))
    scaler.update(4.0)
    assert duplicate(scaler).state_dict() == scaler.state_dict()


def test_the_names_that_frameworks_reach_for_are_there() -> None:
    scaler, torchs = GradScaler("cpu"), torch.amp.GradScaler("cpu")
    for name in (
        "_scale",
        "_growth_tracker",
        "_per_optimizer_states",
        "_get_scale_async",
        "_unscale_grads_",
        "_check_inf_per_device",
        "_found_inf_per_device",
        "_check_scale_growth_tracker",
        "_get_growth_tracker",
        "_lazy_init_scale_growth_tracker",
        "_device",
        "_enabled",
    ):
        assert hasattr(torchs, name), name
        assert hasattr(scaler, name), name
    public = {name for name in dir(torchs) if not name.startswith("_")}
    assert public <= set(dir(scaler))


def test_those_names_answer_as_torchs_do() -> None:
    scaler, torchs = GradScaler("cpu", 8.0), torch.amp.GradScaler("cpu", 8.0)
    for each in (scaler, torchs):
        assert each._get_growth_tracker() == 0
        each._lazy_init_scale_growth_tracker(torch.device("cpu"))
        assert [tensor.item() for tensor in each._check_scale_growth_tracker("a test")] == [8.0, 0]
        parameter = torch.nn.Parameter(torch.zeros(1))
        parameter.grad = torch.full((1,), torch.inf)
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        assert {str(device): found.item() for device, found in each._check_inf_per_device(optimizer).items()} == {"cpu": 1.0}
        assert each._found_inf_per_device(optimizer) == each._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    scaler._lazy_init_scale_growth_tracker("cpu")  # accelerate passes the name, and may come second
    assert scaler.get_scale() == 8.0
