"""GradScaler equals torch.amp.GradScaler step for step, and exchanges states with it."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from amp_core import GradScaler

if TYPE_CHECKING:
    from collections.abc import Callable

Optimizers: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "fused-sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, fused=True),
    "fused-adam": partial(torch.optim.Adam, lr=0.01, fused=True),
    "fused-adamw": partial(torch.optim.AdamW, lr=0.01, fused=True),
}
SETTINGS: dict[str, Any] = {"init_scale": 2.0**10, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 4}
# Which step gets what into which gradient; neighbours and repetitions included.
INJECTED = {3: float("inf"), 11: float("nan"), 12: float("-inf"), 13: float("inf"), 29: float("nan"), 49: float("inf")}


def train(scaler: Any, make_optimizer: Callable[..., torch.optim.Optimizer], *, clip: bool) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = make_optimizer(model.parameters())
    x, y = torch.randn(16, 4), torch.randn(16, 1)
    history = []
    for step in range(50):
        optimizer.zero_grad()
        scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
        if step in INJECTED:
            gradient = model[2].weight.grad
            assert isinstance(gradient, torch.Tensor)
            gradient[0, step % 8] = INJECTED[step]
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        scale = torch.tensor([scaler.get_scale(), scaler._growth_tracker.item()])
        history.append({"scale": scale} | {name: value.clone() for name, value in model.state_dict().items()})
    return history


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("name", Optimizers)
def test_fifty_steps_with_overflows_are_torchs_bit_for_bit(name: str, clip: bool) -> None:
    ours = train(GradScaler("cpu", **SETTINGS), Optimizers[name], clip=clip)
    torchs = train(torch.amp.GradScaler("cpu", **SETTINGS), Optimizers[name], clip=clip)
    for step, (mine, theirs) in enumerate(zip(ours, torchs, strict=True)):
        for key, value in mine.items():
            torch.testing.assert_close(value, theirs[key], rtol=0, atol=0, msg=f"{key} after step {step}")
    assert len({tuple(state["scale"].tolist()) for state in ours}) > 10


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
    ):
        assert hasattr(torchs, name), name
        assert hasattr(scaler, name), name
    public = {name for name in dir(torchs) if not name.startswith("_")}
    assert public <= set(dir(scaler))
