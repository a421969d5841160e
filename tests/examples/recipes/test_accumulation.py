"""Many small batches make the step of one large batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from examples.recipes.accumulation import accumulated_step, train
from examples.recipes.precision import Precision
from examples.recipes.task import network, regression


def after_one_step(dtype: torch.dtype, cuts: list[int], clip: float = 1.0) -> tuple[list[Tensor], float]:
    """The weights after a step over 64 samples that are cut into batches at these places, and the loss before it."""
    inputs, targets = regression(64)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batches = list(zip(inputs.tensor_split(cuts), targets.tensor_split(cuts), strict=True))
    loss = accumulated_step(Precision.of(dtype), model, optimizer, batches, clip)
    return [parameter.detach() for parameter in model.parameters()], loss


@settings(deadline=None, max_examples=20)
@given(st.sets(st.integers(1, 63), max_size=5).map(sorted), st.sampled_from([0.01, 1e6]))
def test_however_the_samples_are_cut_the_step_is_the_same(cuts: list[int], clip: float) -> None:
    whole, loss = after_one_step(torch.float32, [], clip)
    cut, loss_of_cut = after_one_step(torch.float32, cuts, clip)
    assert loss_of_cut == pytest.approx(loss, rel=1e-5)
    for one, other in zip(cut, whole, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_in_float16_it_is_nearly_the_same() -> None:
    whole, _ = after_one_step(torch.float32, [])
    cut, _ = after_one_step(torch.float16, [10, 20, 50])
    for one, other in zip(cut, whole, strict=True):
        torch.testing.assert_close(one, other, atol=2e-3, rtol=0)


def test_an_overflow_in_one_batch_skips_the_whole_step_once() -> None:
    inputs, targets = regression(8)
    targets[5] = 1e30
    model, precision = network(), Precision.of(torch.float16)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pairs = list(zip(inputs.tensor_split(4), targets.tensor_split(4), strict=True))
    accumulated_step(precision, model, optimizer, pairs)
    assert precision.scaler.step_was_skipped
    assert precision.scaler.get_scale() == 2.0**15
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_training_ends_where_that_with_whole_batches_does() -> None:
    whole, cut, low = (
        train(dtype, 40, batches) for dtype, batches in [(torch.float32, 1), (torch.float32, 8), (torch.float16, 8)]
    )
    assert whole["loss"] < 0.3
    assert cut["loss"] == pytest.approx(whole["loss"], rel=1e-2)
    assert low["loss"] == pytest.approx(whole["loss"], rel=0.1)
