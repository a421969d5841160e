"""Softmax and log-softmax hold for every finite float16 logit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from amp_core import autocast
from examples.stable_softmax import stable
from examples.stable_softmax.demonstration import error_in_units
from tests.examples.stable_softmax.strategies import finite, masked_rows, rows, tensor, untimed


@untimed
@given(rows)
def test_softmax_is_the_exact_one_rounded_to_float16(row: list[float]) -> None:
    logits = tensor(row)
    result = stable.softmax(logits)
    assert result.dtype is torch.float16
    assert error_in_units(result, torch.softmax(logits.double(), 1)) < 0.51


@untimed
@given(rows)
def test_probabilities_add_up_to_one(row: list[float]) -> None:
    result = stable.softmax(tensor(row)).double()
    assert ((result >= 0) & (result <= 1)).all()
    # Each is rounded by at most 2^-11 of itself, or by 2^-25 near 0.
    assert result.sum().item() == pytest.approx(1, abs=2**-11 + len(row) * 2**-25 + 1e-6)


@untimed
@given(rows)
def test_log_softmax_is_the_exact_one_rounded_to_float16(row: list[float]) -> None:
    logits = tensor(row)
    result, exact = stable.log_softmax(logits).double(), torch.log_softmax(logits.double(), 1)
    out_of_range = exact.half().isinf()
    assert torch.equal(result.isinf(), out_of_range)
    # The sum of n powers, which is at least 1, is rounded n times in float32.
    allowed = 2**-11 * 1.01 * exact.abs() + len(row) * 2**-24 + 2**-25
    assert ((result - exact).abs() <= allowed)[~out_of_range].all()


@untimed
@given(st.lists(st.integers(-512, 512).map(lambda quarter: quarter / 4), min_size=1, max_size=40), st.integers(-512, 512))
def test_a_shift_of_all_logits_changes_no_bit(row: list[float], quarters: int) -> None:
    logits = tensor(row)  # quarters up to 256 are exact in float16
    shifted = logits + quarters / 4
    assert torch.equal(stable.softmax(shifted), stable.softmax(logits))
    assert torch.equal(stable.log_softmax(shifted), stable.log_softmax(logits))


@untimed
@given(st.lists(finite, min_size=1, max_size=10), finite)
def test_so_does_any_shift_that_is_exact(row: list[float], shift: float) -> None:
    logits = tensor(row)
    shifted = logits + shift
    assume(torch.equal(shifted.double(), logits.double() + shift))
    assert torch.equal(stable.softmax(shifted), stable.softmax(logits))


@untimed
@given(masked_rows())
def test_a_mask_takes_entries_out(case: tuple[Tensor, Tensor]) -> None:
    logits, mask = case
    result, logs = stable.softmax(logits, mask=mask), stable.log_softmax(logits, mask=mask)
    assert (result[~mask] == 0).all()
    assert (logs[~mask] == -math.inf).all()
    kept = logits[mask][None]
    if kept.numel():
        # Not bit for bit: a row of another length is summed in another order.
        torch.testing.assert_close(result[mask][None], stable.softmax(kept))
        torch.testing.assert_close(logs[mask][None], stable.log_softmax(kept))


@pytest.mark.parametrize("compute", [None, torch.float16])
@untimed
@given(case=masked_rows())
def test_neither_the_result_nor_the_gradient_is_ever_nan(compute: torch.dtype | None, case: tuple[Tensor, Tensor]) -> None:
    logits, mask = case
    logits.requires_grad_()
    incoming = torch.rand(logits.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float16)
    for function in (stable.softmax, stable.log_softmax):
        result = function(logits, mask=mask, compute=compute)
        (gradient,) = torch.autograd.grad(result, logits, incoming)
        assert not result.isnan().any()
        assert gradient.isfinite().all()
        assert (gradient[~mask] == 0).all()


@untimed
@given(rows)
def test_in_float16_it_is_stable_and_nearly_right(row: list[float]) -> None:
    logits = tensor(row)
    result, exact = stable.softmax(logits, compute=torch.float16).double(), torch.softmax(logits.double(), 1)
    assert ((result - exact).abs() < 2**-7 * exact + len(row) * 2**-11 * exact + 2**-23).all()


@pytest.mark.parametrize("function", [stable.softmax, stable.log_softmax])
def test_gradients_are_those_of_the_formula(function: object) -> None:
    logits = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    mask = torch.tensor([[True] * 5, [True, False, True, True, False], [False] * 5])
    assert callable(function)

    def finite_part(x: Tensor) -> Tensor:
        result: Tensor = function(x, mask=mask)
        return torch.where(mask, result, 0.0)

    assert torch.autograd.gradcheck(finite_part, logits)


def test_a_row_without_any_allowed_entry_is_zero_and_has_no_gradient() -> None:
    logits = torch.ones(2, 3, dtype=torch.float16, requires_grad=True)
    mask = torch.tensor([[True], [False]]).expand(2, 3)
    result = stable.softmax(logits, mask=mask)
    assert result[1].tolist() == [0, 0, 0]
    assert stable.log_softmax(logits, mask=mask)[1].tolist() == [-math.inf] * 3
    result[:, 0].sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert logits.grad[0].abs().sum() > 0
    assert logits.grad[1].tolist() == [0, 0, 0]


def test_logits_of_minus_infinity_are_masked_ones() -> None:
    logits = torch.tensor([[1.0, -math.inf, 2.0], [-math.inf] * 3]).half()
    mask = logits != -math.inf
    assert torch.equal(stable.softmax(logits), stable.softmax(logits.nan_to_num(), mask=mask))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_overflow_before_is_not_hidden(bad: float) -> None:
    logits = torch.tensor([[bad, 1.0], [0.0, 0.0]]).half()
    for function in (stable.softmax, stable.log_softmax):
        assert function(logits)[0].isnan().all()
        assert function(logits)[1].isfinite().all()


def test_more_equal_logits_than_float16_can_count_are_right_in_float32_only() -> None:
    logits = torch.full((1, 100_000), 3.0).half()
    exact = torch.full((1, 100_000), 1e-5, dtype=torch.float64)
    assert error_in_units(stable.softmax(logits), exact) < 0.5
    assert stable.softmax(logits, compute=torch.float16).max() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_other_dtypes_and_dimensions_are_as_torch_has_them(dtype: torch.dtype, dim: int) -> None:
    logits = (10 * torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0))).to(dtype)
    exact = logits.double()
    torch.testing.assert_close(stable.softmax(logits, dim), torch.softmax(exact, dim).to(dtype))
    torch.testing.assert_close(stable.log_softmax(logits, dim), torch.log_softmax(exact, dim).to(dtype))


def test_float64_stays_exact() -> None:
    logits = torch.tensor([[0.0, 1e-12]], dtype=torch.float64)
    assert torch.equal(stable.softmax(logits), torch.softmax(logits, 1))


@pytest.mark.parametrize("policy", ["native", "cuda"])
def test_in_an_autocast_region_it_is_the_same(policy: str) -> None:
    logits = torch.tensor([[12.0, 1.0, -20.0]]).half()
    with autocast("cpu", torch.float16, policy=policy):
        inside = stable.softmax(logits), stable.log_softmax(logits)
    assert torch.equal(inside[0], stable.softmax(logits))
    assert torch.equal(inside[1], stable.log_softmax(logits))


@pytest.mark.parametrize(
    ("logits", "mask", "error", "message"),
    [
        (torch.ones(2, 3).long(), None, TypeError, "logits must be floating point, got torch.int64"),
        (torch.ones(2, 3), torch.ones(2, 3), TypeError, "mask must be bool, True where an entry is allowed, got torch.float32"),
        (torch.ones(2, 3), torch.ones(4, 3).bool(), ValueError, r"a mask of shape \(4, 3\) does not fit .* \(2, 3\)"),
        (torch.ones(3), torch.ones(2, 3).bool(), ValueError, r"a mask of shape \(2, 3\) does not fit .* \(3,\)"),
    ],
)
def test_wrong_input_is_named(logits: Tensor, mask: Tensor | None, error: type[Exception], message: str) -> None:
    for function in (stable.softmax, stable.log_softmax):
        with pytest.raises(error, match=message):
            function(logits, mask=mask)
