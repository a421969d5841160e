"""GradScaler beside torch.amp.GradScaler: steps, states, settings."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from halfserve import GradScaler
from halfserve.amp_core.grad_scaler.outcomes import ScaleRecord
from tests.amp_core.grad_scaler.iteration import backward, iterate, model_and_optimizer, parameter_with, ready, train_step


def test_of_several_optimizers_it_says_whose_step_was_skipped() -> None:
    (model, optimizer), (other, other_optimizer) = model_and_optimizer(), model_and_optimizer()
    scaler = GradScaler("cpu")
    backward(scaler, model, overflow_in="0.weight")
    backward(scaler, other)
    scaler.step(optimizer)
    scaler.step(other_optimizer)
    scaler.update()
    assert (scaler.step_was_skipped, scaler.skipped(optimizer), scaler.skipped(other_optimizer)) == (True, True, False)
    assert scaler.get_scale() == 2.0**15


@pytest.mark.parametrize("fused", [False, True])
def test_it_names_the_parameters_that_overflowed(fused: bool) -> None:
    model, optimizer = model_and_optimizer(fused=fused)
    scaler = GradScaler("cpu")
    train_step(scaler, model, optimizer, "1.weight")
    assert scaler.overflowed_parameters(model) == ["1.weight"]
    assert scaler.overflowed_parameters() == ["group 0, parameter 2"]
    backward(scaler, model)
    scaler.step(optimizer)
    assert scaler.overflowed_parameters(model) == []


def test_parameters_that_were_taken_out_of_the_optimizer_leave_names_for_the_others() -> None:
    """As whoever freezes layers in the middle of a training may do it: the names in the group stay behind."""
    model, optimizer = model_and_optimizer(named=True)
    optimizer.param_groups[0]["params"] = list(model[1].parameters())
    scaler = GradScaler("cpu")
    train_step(scaler, model, optimizer, "1.bias")
    assert (scaler.overflowed_parameters(), scaler.overflowed_parameters(model)) == (["group 0, parameter 1"], ["1.bias"])


def test_a_parameter_that_leaves_the_optimizer_after_its_overflow() -> None:
    model, optimizer = model_and_optimizer()
    scaler = GradScaler("cpu")
    backward(scaler, model, overflow_in="0.bias")
    scaler.step(optimizer)
    optimizer.param_groups[0]["params"] = list(model[1].parameters())
    scaler.update()
    assert scaler.get_scale() == 2.0**15
    assert scaler.overflowed_parameters() == ["a parameter that the optimizer no longer has"]
    assert scaler.overflowed_parameters(model) == ["0.bias"]


def test_the_names_survive_clipping_by_a_norm_that_is_nan() -> None:
    model, optimizer = model_and_optimizer(named=True)
    scaler = GradScaler("cpu")
    backward(scaler, model, overflow_in="0.bias", by=math.nan)
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert all(torch.isnan(p.grad).all() for p in model.parameters() if p.grad is not None)
    scaler.step(optimizer)
    assert scaler.overflowed_parameters() == ["0.bias"]


def test_the_scale_keeps_within_its_limits() -> None:
    model, optimizer = model_and_optimizer()
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1, min_scale=2.0, max_scale=16.0, on_min_scale="stop")
    scales = []
    for overflow_in in (None, None, "0.bias", "0.bias", "0.bias", "0.bias", "0.bias", None):
        train_step(scaler, model, optimizer, overflow_in)
        scales.append(scaler.get_scale())
    assert scales == [16.0, 16.0, 8.0, 4.0, 2.0, 2.0, 2.0, 4.0]


def test_outputs_may_be_nested() -> None:
    scaler = GradScaler("cpu", init_scale=4.0)
    one = torch.ones(())
    scaled: Any = scaler.scale([one, (one, [one])])
    assert (type(scaled), type(scaled[1])) == (list, tuple)
    assert (scaled[0], scaled[1][0], scaled[1][1][0]) == (4.0, 4.0, 4.0)
    assert [x.item() for x in scaler.scale(x for x in (one, one))] == [4.0, 4.0]
    for wrong in (3.0, "loss", None):
        output: Any = wrong
        with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable of Tensors, got a"):
            scaler.scale(output)


def test_sparse_and_complex_gradients_are_unscaled() -> None:
    embedding, complex_parameter = nn.Embedding(4, 2, sparse=True), nn.Parameter(torch.ones(2, dtype=torch.complex64))
    optimizer = torch.optim.SGD([*embedding.parameters(), complex_parameter], lr=1.0)
    scaler = GradScaler("cpu", init_scale=8.0)
    before = embedding.weight.detach().clone()
    torch.autograd.backward(scaler.scale(embedding(torch.tensor([1, 1, 3])).sum() + complex_parameter.real.sum()))
    scaler.step(optimizer)
    change = before - embedding.weight.detach()
    torch.testing.assert_close(change, torch.tensor([[0.0, 0.0], [2.0, 2.0], [0.0, 0.0], [1.0, 1.0]]))
    assert torch.equal(complex_parameter.detach(), torch.zeros(2, dtype=torch.complex64))


def test_disabled_it_passes_everything_through() -> None:
    model, optimizer = model_and_optimizer()
    scaler = GradScaler("cpu", enabled=False)
    loss = model(torch.ones(1, 2)).sum()
    assert scaler.scale(loss) is loss
    torch.autograd.backward(loss)
    before = model.get_parameter("0.weight").detach().clone()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(before, model.get_parameter("0.weight"))
    assert (scaler.is_enabled(), scaler.get_scale(), scaler.state_dict(), scaler.step_was_skipped) == (False, 1.0, {}, False)
    scaler.load_state_dict({})


def test_enabled_for_cuda_without_cuda_it_warns_and_does_nothing() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.warns(UserWarning, match="CUDA is not available. Disabling"):
        assert not GradScaler("cuda").is_enabled()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_scale_lives_on_the_device_of_the_loss() -> None:
    model, optimizer = model_and_optimizer(fused=True)
    model.cuda()
    scaler = GradScaler("cuda")
    torch.autograd.backward(scaler.scale(model(torch.ones(1, 2, device="cuda")).sum()))
    scaler.step(optimizer)
    scaler.update()
    assert scaler._scale is not None
    assert scaler._scale.device.type == "cuda"


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
    train_step(scaler, model, optimizer, "0.bias")
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


REFUSED: dict[str, tuple[list[Any], str]] = {
    "device": (["gpu", "", "cuda0", 3.5, "float16"], "must be the name of a device type, such as 'cuda' or 'cpu', got"),
    "hysteresis": ([0, -1, 1.5, True, "2"], "must be an integer >= 1, got"),
    "history_size": ([-1, 1.5, None], "must be an integer >= 0, got"),
    "on_min_scale": (["ignore", "", None, True], "must be 'warn', 'raise' or 'stop', got"),
    "reduce_found_inf": (["max"], "must be a function of a tensor, or None, got 'max'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_impossible_setting_is_refused(name: str) -> None:
    values, message = REFUSED[name]
    for value in values:
        with pytest.raises(ValueError, match=f"{name} {message}"):
            GradScaler(**{"device": "cpu", name: value})


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (2.0, 1.0), (2.0**-127, 1.0), (1.0, math.inf), (math.nan, 1.0)])
def test_impossible_limits_are_refused(low: float, high: float) -> None:
    with pytest.raises(ValueError, match=r"expected 2\*\*-126 <= min_scale <= max_scale <= 2\*\*127"):
        GradScaler("cpu", init_scale=1.0, min_scale=low, max_scale=high)


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
    parameter, optimizer = parameter_with([0.0])
    scaler = ready(init_scale=8.0, growth_interval=2)
    iterate(scaler, optimizer, parameter, math.inf)
    twin = duplicate(scaler)
    assert twin.state_dict() == scaler.state_dict()
    twin.scale(torch.ones(()))
    iterate(twin, optimizer, parameter, 1.0)
    assert twin.history == [*scaler.history, ScaleRecord(step=2, scale=4.0, skipped=False)]


def test_the_names_that_frameworks_reach_for_are_there() -> None:
    scaler, torchs = GradScaler("cpu"), torch.amp.GradScaler("cpu")
    for name in [
        "_scale", "_growth_tracker", "_per_optimizer_states", "_get_scale_async",
        "_unscale_grads_", "_check_inf_per_device", "_found_inf_per_device", "_check_scale_growth_tracker",
        "_get_growth_tracker", "_lazy_init_scale_growth_tracker", "_device", "_enabled",
    ]:  # fmt: skip
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
