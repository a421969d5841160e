"""With one scaler, an overflow keeps back the optimizer that it happened to, and no other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from amp_core import GradScaler
from examples.recipes.precision import Precision
from examples.recipes.several_optimizers import HIDDEN, Learner, train, train_step
from examples.recipes.task import INPUTS, device_in_use, network, regression


def learners() -> tuple[Learner, Learner]:
    return Learner(network(), 0.01), Learner(nn.Linear(HIDDEN, INPUTS).to(device_in_use()), 0.01)


def weights(learner: Learner) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in learner.module.parameters()]


def changed(learner: Learner, before: list[Tensor]) -> bool:
    return not all(torch.equal(a, b) for a, b in zip(before, weights(learner), strict=True))


def step(precision: Precision, pair: tuple[Learner, Learner], *, spoil: int | None = None) -> list[bool]:
    """One iteration in which the gradients of one of the two may be spoiled; answers which of them moved."""
    hooks = [
        parameter.register_hook(lambda gradient: gradient * torch.inf)  # type: ignore[no-untyped-call]
        for place, learner in enumerate(pair)
        for parameter in learner.module.parameters()
        if place == spoil
    ]
    before = [weights(learner) for learner in pair]
    train_step(precision, *pair, *regression(16))
    for hook in hooks:
        hook.remove()
    return [changed(learner, was) for learner, was in zip(pair, before, strict=True)]


def small_scale() -> Precision:
    return Precision(Precision.of(torch.float16).region, GradScaler(init_scale=8.0, growth_interval=1000))


@pytest.mark.parametrize(("spoil", "moved"), [(None, [True, True]), (0, [False, True]), (1, [True, False])])
def test_only_the_one_that_overflows_is_kept_back(spoil: int | None, moved: list[bool]) -> None:
    pair, precision = learners(), small_scale()
    assert step(precision, pair, spoil=spoil) == moved
    assert [learner.skipped_steps for learner in pair] == [int(not one) for one in moved]
    # Its learning rate stays too; the scale that they share backs off once for both.
    rates = [learner.optimizer.param_groups[0]["lr"] for learner in pair]
    assert rates == [pytest.approx(0.0099 if one else 0.01) for one in moved]
    assert precision.scaler.get_scale() == (8.0 if spoil is None else 4.0)


def test_after_an_overflow_both_go_on() -> None:
    pair, precision = learners(), small_scale()
    assert step(precision, pair, spoil=1) == [True, False]
    assert step(precision, pair) == [True, True]


def test_the_probe_leaves_the_predictors_gradients_alone() -> None:
    alone = Learner(network(), 0.01)
    inputs, targets = regression(16)
    nn.functional.mse_loss(alone.module(inputs), targets).backward()  # type: ignore[no-untyped-call]
    predictor, probe = learners()
    train_step(Precision.of(torch.float32), predictor, probe, inputs, targets)
    for one, other in zip(alone.module.parameters(), predictor.module.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_in_float16_the_large_loss_overflows_first_and_both_learn_as_in_float32() -> None:
    low, full = (train(dtype, steps=80) for dtype in (torch.float16, torch.float32))
    assert low["skipped"] == 0
    assert low["skipped by the probe"] >= 3
    assert low["scale"] == 2.0 ** (16 - low["skipped by the probe"])
    assert full["predictor's loss"] < 0.1
    assert low["predictor's loss"] == pytest.approx(full["predictor's loss"], rel=0.1)
    assert low["probe's loss"] == pytest.approx(full["probe's loss"], rel=0.1)
    assert (full["skipped"], full["skipped by the probe"], full["scale"]) == (0, 0, 1)
