"""GradScaler's own answers step by step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from amp_core import GradScaler
from tests.amp_core.scaling.iteration import backward, model_and_optimizer


@pytest.mark.parametrize("fused", [False, True])
def test_it_says_whether_the_step_was_skipped(fused: bool) -> None:
    model, optimizer = model_and_optimizer(fused=fused)
    scaler = GradScaler("cpu")
    assert not scaler.step_was_skipped
    for overflow_in, skipped in (("0.weight", True), (None, False), ("1.bias", True)):
        before = model.get_parameter("0.weight").detach().clone()
        backward(scaler, model, overflow_in=overflow_in)
        scaler.step(optimizer)
        assert scaler.step_was_skipped is skipped
        scaler.update()
        assert scaler.step_was_skipped is skipped
        assert torch.equal(before, model.get_parameter("0.weight")) is skipped


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
    backward(scaler, model, overflow_in="1.weight")
    scaler.step(optimizer)
    scaler.update()
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
    backward(scaler, model, overflow_in="1.bias")
    scaler.step(optimizer)
    scaler.update()
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
        backward(scaler, model, overflow_in=overflow_in)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [16.0, 16.0, 8.0, 4.0, 2.0, 2.0, 2.0, 4.0]


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (2.0, 1.0), (2.0**-127, 1.0), (1.0, math.inf), (math.nan, 1.0)])
def test_impossible_limits_are_refused(low: float, high: float) -> None:
    with pytest.raises(ValueError, match=r"expected 2\*\*-126 <= min_scale <= max_scale <= 2\*\*127"):
        GradScaler("cpu", init_scale=1.0, min_scale=low, max_scale=high)


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
