"""The penalty's gradient in float16 is that in float32, which is that of the formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from amp_core import GradScaler
from examples.recipes.gradient_penalty import backward_with_penalty, train
from examples.recipes.precision import Precision
from examples.recipes.task import network, regression

WEIGHT = 300.0


def gradients(
    dtype: torch.dtype, weight: float, shrink: float = 1.0, *, of_parameters: bool = False, scale: float = 2.0**16
) -> list[Tensor]:
    """Unscaled gradients of the loss, times `shrink`, and its penalty."""
    inputs, targets = regression(32)
    inputs.requires_grad_()
    scaler = GradScaler(init_scale=scale, enabled=dtype is torch.float16)
    model, precision = network(), Precision(Precision.of(dtype).region, scaler)
    sources = list(model.parameters()) if of_parameters else [inputs]
    backward_with_penalty(precision, lambda: shrink * nn.functional.mse_loss(model(inputs), targets), sources, weight)
    precision.scaler.unscale_(torch.optim.SGD(model.parameters(), lr=1.0))
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def assert_near(some: list[Tensor], others: list[Tensor], share: float) -> None:
    for one, other in zip(some, others, strict=True):
        assert (one - other).norm() <= share * other.norm()


def test_in_float32_it_is_the_gradient_of_the_formula() -> None:
    inputs, targets = regression(32)
    inputs.requires_grad_()
    model = network()
    loss = nn.functional.mse_loss(model(inputs), targets)
    (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
    by_hand = torch.autograd.grad(loss + WEIGHT * slope.square().sum(), list(model.parameters()), allow_unused=True)
    # The last bias moves every output alike, and so the loss; nothing is unused.
    assert_near(gradients(torch.float32, WEIGHT), [gradient for gradient in by_hand if gradient is not None], 1e-5)


# With these weights the penalty is three to four times, or most, of the gradients that are compared.
@pytest.mark.parametrize(("of_parameters", "weight"), [(False, WEIGHT), (True, 1.0)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_mixed_precision_it_is_nearly_that_in_float32(dtype: torch.dtype, of_parameters: bool, weight: float) -> None:
    share = 0.02 if dtype is torch.float16 else 0.16  # 20 times the eps of float16, 2^-10, and of bfloat16, 2^-7
    low, full, without = (
        gradients(kind, w, of_parameters=of_parameters)
        for kind, w in [(dtype, weight), (torch.float32, weight), (torch.float32, 0.0)]
    )
    assert_near(low, full, share)
    assert (full[0] - without[0]).norm() > 2 * without[0].norm()


def test_gradients_too_small_for_float16_are_kept_by_the_scale() -> None:
    shrink = 1e-6  # of the loss: its gradients by the inputs are then below the smallest float16, 6e-8
    full = gradients(torch.float32, 1e5, shrink)
    assert_near(gradients(torch.float16, 1e5, shrink), full, 0.02)
    unscaled = gradients(torch.float16, 1e5, shrink, scale=1.0)
    assert (unscaled[0] - full[0]).norm() > 0.5 * full[0].norm()


def test_an_overflow_inside_skips_the_step_and_the_next_goes_on() -> None:
    inputs, targets = regression(32)
    inputs.requires_grad_()
    model = network()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    precision = Precision(Precision.of(torch.float16).region, GradScaler(init_scale=2.0**40, backoff_factor=2.0**-24))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    skipped = []
    for _ in range(2):
        optimizer.zero_grad()
        _, penalty = backward_with_penalty(
            precision, lambda: nn.functional.mse_loss(model(inputs), targets), [inputs], weight=1.0
        )
        precision.scaler.step(optimizer)
        skipped.append(precision.scaler.step_was_skipped)
        assert penalty.isfinite().item() is not skipped[-1]
        unchanged = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert unchanged is skipped[-1]
        precision.scaler.update()
    assert skipped == [True, False]


def test_both_precisions_learn_alike() -> None:
    low, full = (train(dtype, steps=40, weight=0.01) for dtype in (torch.float16, torch.float32))
    start = train(torch.float32, steps=1, weight=0.01)
    assert full["loss"] < 0.3 * start["loss"]
    assert low["loss"] == pytest.approx(full["loss"], rel=0.05)
    assert low["penalty"] == pytest.approx(full["penalty"], rel=0.1)


def test_a_larger_weight_leaves_a_smaller_penalty() -> None:
    mild, strong = (train(torch.float16, steps=40, weight=weight)["penalty"] for weight in (0.0, 0.5))
    assert strong < 0.5 * mild
