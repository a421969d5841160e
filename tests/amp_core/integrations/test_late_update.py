"""LateUpdate, and the message for a framework that is not installed."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from halfserve import GradScaler
from halfserve.amp_core.integrations import not_installed
from halfserve.amp_core.integrations.late_update import LateUpdate

Nets = list[nn.Linear]


def two_nets() -> tuple[Nets, list[torch.optim.Optimizer]]:
    torch.manual_seed(0)
    nets = [nn.Linear(2, 1), nn.Linear(2, 1)]
    return nets, [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]


def backward(scaler: Any, nets: Nets, overflows: tuple[bool, ...]) -> None:
    for net, overflow in zip(nets, overflows, strict=True):
        net.zero_grad()
        torch.autograd.backward(scaler.scale(net(torch.ones(1, 2)).sum() * (float("inf") if overflow else 1.0)))


def train_as_documented(schedule: list[tuple[bool, bool]]) -> tuple[Nets, GradScaler]:
    """torch's way: step every optimizer, then update once."""
    nets, optimizers = two_nets()
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=2)
    for overflows in schedule:
        backward(scaler, nets, overflows)
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    return nets, scaler


def train_as_frameworks_do(schedule: list[tuple[bool, bool]], *, expected: bool) -> tuple[Nets, LateUpdate]:
    """Unscale all, then step and update one optimizer after the other."""
    nets, optimizers = two_nets()
    scaler = LateUpdate(GradScaler("cpu", init_scale=4.0, growth_interval=2))
    if expected:
        scaler.expect(optimizers)
    for overflows in schedule:
        backward(scaler, nets, overflows)
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    return nets, scaler


@given(schedule=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=8), expected=st.booleans())
@settings(max_examples=40, deadline=None)
def test_two_optimizers_in_one_iteration_equal_torchs_documented_order(
    schedule: list[tuple[bool, bool]], expected: bool
) -> None:
    nets, documented = train_as_documented(schedule)
    others, late = train_as_frameworks_do(schedule, expected=expected)
    for net, other in zip(nets, others, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))
    assert late.get_scale() == documented.get_scale()
    assert late.state_dict() == documented.state_dict()


def test_without_it_the_second_optimizer_steps_too_far() -> None:
    """Shows that the schedule above can tell the difference: an early update leaves the second gradient twice as large."""
    nets, optimizers = two_nets()
    before = nets[1].weight.detach().clone()
    scaler = GradScaler("cpu", init_scale=4.0)
    backward(scaler, nets, (True, False))
    for optimizer in optimizers:
        scaler.step(optimizer)
        scaler.update()
    torch.testing.assert_close(before - nets[1].weight, torch.full((1, 2), 0.2))
    nets, _ = train_as_frameworks_do([(True, False)], expected=True)
    torch.testing.assert_close(before - nets[1].weight, torch.full((1, 2), 0.1))


def test_the_scale_that_it_tells_is_that_of_the_gradients_still_to_be_stepped_with() -> None:
    nets, optimizers = two_nets()
    scaler = LateUpdate(GradScaler("cpu", init_scale=4.0))
    scaler.expect(optimizers)
    backward(scaler, nets, (True, False))
    told = [scaler.get_scale()]
    for optimizer in optimizers:
        scaler.step(optimizer)
        scaler.update()
        told.append(scaler.get_scale())
    assert told == [4.0, 4.0, 2.0]
    assert (scaler.step_was_skipped, *map(scaler.skipped, optimizers)) == (True, True, False)
    assert scaler.overflowed_parameters(nets[0]) == ["weight", "bias"]


def test_unscaling_twice_is_fine_until_there_are_new_gradients() -> None:
    nets, optimizers = two_nets()
    scaler = LateUpdate(GradScaler("cpu", init_scale=4.0))
    backward(scaler, nets, (False, False))
    for _ in range(2):
        scaler.unscale_(optimizers[0])
    gradient = nets[0].weight.grad
    assert gradient is not None
    assert torch.equal(gradient, torch.ones(1, 2))
    backward(scaler, nets, (False, False))
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called on this optimizer since the last update"):
        scaler.unscale_(optimizers[0])


def test_an_optimizer_that_steps_again_begins_an_iteration() -> None:
    nets, optimizers = two_nets()
    scaler = LateUpdate(GradScaler("cpu", init_scale=4.0, growth_interval=1))
    scaler.expect(optimizers)
    backward(scaler, nets, (False, False))
    for _ in range(2):
        scaler.step(optimizers[0])
        scaler.update()
    assert scaler.scaler.get_scale() == 8.0
    assert scaler.state_dict()["scale"] == 16.0


def test_loading_a_state_ends_the_iteration() -> None:
    nets, optimizers = two_nets()
    scaler = LateUpdate(GradScaler("cpu", init_scale=4.0))
    saved = GradScaler("cpu", init_scale=64.0).state_dict()
    scaler.expect(optimizers)
    backward(scaler, nets, (True, False))
    scaler.step(optimizers[0])
    scaler.update()
    scaler.load_state_dict(saved)
    assert scaler.state_dict() == saved


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])  # noqa: S301  (our own)
def test_a_copy_in_another_process_goes_on_by_itself(copied: Any) -> None:
    nets, optimizers = two_nets()
    scaler = LateUpdate(GradScaler("cpu", init_scale=4.0))
    scaler.expect(optimizers)
    backward(scaler, nets, (True, False))
    scaler.step(optimizers[0])
    scaler.update()
    other = copied(scaler)
    assert other.state_dict() == scaler.state_dict()
    assert other.get_growth_interval() == 2000


def test_what_it_does_not_change_is_the_scalers_own() -> None:
    scaler = LateUpdate(GradScaler("cpu", min_scale=8.0, enabled=False))
    assert (scaler.min_scale, scaler.is_enabled(), scaler.get_backoff_factor()) == (8.0, False, 0.5)
    with pytest.raises(AttributeError, match="'GradScaler' object has no attribute 'unknown'"):
        _ = scaler.unknown


OURS = "halfserve.amp_core.integrations"


@pytest.mark.parametrize(
    ("module", "package", "minimum"), [("lightning", "lightning", "2.6"), ("accelerate", "accelerate", "1.15")]
)
def test_a_missing_framework_is_named(monkeypatch: pytest.MonkeyPatch, module: str, package: str, minimum: str) -> None:
    for name in [name for name in sys.modules if name.startswith(f"{OURS}.") or name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"needs {package}, which is not installed: pip install '{package}>={minimum}'"):
        importlib.import_module(f"{OURS}.{module}")


def test_another_missing_module_is_left_as_it_is() -> None:
    error = ModuleNotFoundError("No module named 'yaml'", name="yaml")
    assert not_installed(error, "lightning", "2.6") is error


def test_the_folder_itself_imports_no_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("lightning", "accelerate"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, OURS)
    folder = importlib.import_module(OURS)
    missing = folder.not_installed(ModuleNotFoundError(name="lightning"), "lightning", "2.6")
    assert "pip install 'lightning>=2.6'" in str(missing)
