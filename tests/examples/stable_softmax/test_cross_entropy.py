"""The cross-entropy is torch's where torch defines one, and defined for masked classes too."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from examples.stable_softmax import stable
from tests.examples.stable_softmax.strategies import rows, tensor, untimed

shares = st.floats(0, 1)


@untimed
@given(rows, shares, st.data())
def test_it_is_torchs_in_float64(row: list[float], smoothing: float, data: st.DataObject) -> None:
    logits = tensor(row)
    target = torch.tensor([data.draw(st.integers(0, len(row) - 1))])
    exact = functional.cross_entropy(logits.double(), target, label_smoothing=smoothing)
    result = stable.cross_entropy(logits, target, label_smoothing=smoothing)
    assert result.dtype is torch.float32
    assert result.item() == pytest.approx(exact.item(), rel=1e-5, abs=1e-5)


@untimed
@given(rows, shares, st.data())
def test_its_gradient_is_torchs_too(row: list[float], smoothing: float, data: st.DataObject) -> None:
    target = torch.tensor([data.draw(st.integers(0, len(row) - 1))])
    ours, torchs = tensor(row).requires_grad_(), tensor(row).double().requires_grad_()
    stable.cross_entropy(ours, target, label_smoothing=smoothing).backward()  # type: ignore[no-untyped-call]
    functional.cross_entropy(torchs, target, label_smoothing=smoothing).backward()  # type: ignore[no-untyped-call]
    assert ours.grad is not None
    assert torchs.grad is not None
    torch.testing.assert_close(ours.grad.double(), torchs.grad, atol=2**-24 + 1e-7, rtol=2**-10)


def masked_batch() -> tuple[Tensor, Tensor, Tensor]:
    """Logits (3, 4), targets (3,), and a mask that leaves nothing of the middle row."""
    logits = 5 * torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[True, True, False, True], [False] * 4, [True] * 4])
    return logits.half().requires_grad_(), torch.tensor([0, 2, 3]), mask


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_a_row_without_any_allowed_class_does_not_count(smoothing: float) -> None:
    logits, targets, mask = masked_batch()
    loss = stable.cross_entropy(logits, targets, mask=mask, label_smoothing=smoothing)
    with torch.no_grad():
        first = functional.cross_entropy(logits[:1, [0, 1, 3]].double(), targets[:1], label_smoothing=smoothing)
        last = functional.cross_entropy(logits[2:].double(), targets[2:], label_smoothing=smoothing)
    assert loss.item() == pytest.approx(((first + last) / 2).item(), rel=1e-5)
    loss.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert (logits.grad[~mask] == 0).all()
    assert logits.grad[0].abs().sum() > 0


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_no_row_that_counts_is_no_loss(smoothing: float) -> None:
    logits, targets, mask = masked_batch()
    loss = stable.cross_entropy(logits, targets, mask=torch.zeros_like(mask), label_smoothing=smoothing)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 0
    assert logits.grad is not None
    assert (logits.grad == 0).all()
    assert stable.cross_entropy(torch.ones(0, 4), torch.ones(0).long()).item() == 0


def test_a_target_that_is_masked_out_costs_infinitely_much() -> None:
    logits, target, mask = torch.zeros(1, 3, dtype=torch.float16), torch.tensor([0]), torch.tensor([[False, True, True]])
    for smoothing in (0.0, 0.5):
        assert stable.cross_entropy(logits, target, mask=mask, label_smoothing=smoothing).item() == math.inf
    # Smoothed entirely, the target has no say.
    assert stable.cross_entropy(logits, target, mask=mask, label_smoothing=1.0).item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_an_overflow_before_is_not_hidden(bad: float, smoothing: float) -> None:
    logits = torch.tensor([[bad, 1.0], [0.0, 0.0]]).half()
    assert stable.cross_entropy(logits, torch.tensor([1, 0]), label_smoothing=smoothing).isnan()


@pytest.mark.parametrize(
    ("logits", "targets", "smoothing", "error", "message"),
    [
        (torch.ones(4), torch.tensor([1]), 0.0, ValueError, r"logits must have the shape \(n, classes\), got \(4,\)"),
        (torch.ones(1, 4), torch.tensor([1.0]), 0.0, TypeError, "targets must be int64 class numbers, got torch.float32"),
        (torch.ones(1, 4), torch.tensor([1, 2]), 0.0, ValueError, r"targets must have the shape \(1,\), one .* got \(2,\)"),
        (torch.ones(1, 4), torch.tensor([4]), 0.0, ValueError, "targets must be between 0 and 3, got 4 to 4"),
        (torch.ones(1, 4), torch.tensor([-1]), 0.0, ValueError, "targets must be between 0 and 3, got -1 to -1"),
        (torch.ones(1, 4), torch.tensor([1]), 1.5, ValueError, "label_smoothing must be between 0 and 1, got 1.5"),
        (torch.ones(1, 4).long(), torch.tensor([1]), 0.0, TypeError, "logits must be floating point"),
    ],
)  # fmt: skip
def test_wrong_input_is_named(logits: Tensor, targets: Tensor, smoothing: float, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        stable.cross_entropy(logits, targets, label_smoothing=smoothing)
