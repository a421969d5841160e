"""Softmax, log-softmax and cross-entropy hold for every finite float16 logit; the textbook's do not."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from typer.testing import CliRunner

from halfserve import autocast
from halfserve.examples.stable_softmax import stable
from halfserve.examples.stable_softmax.__main__ import (
    SoftmaxErrors,
    app,
    cases,
    error_in_units,
    measure,
    textbook_cross_entropy,
    textbook_softmax,
)

pytestmark = pytest.mark.long

untimed = settings(deadline=None)  # the first example pays for what torch loads late
LARGEST = torch.finfo(torch.float16).max
finite = st.floats(-LARGEST, LARGEST, width=16)
# Half of the rows have logits as they are in practice, half any that there are.
rows = st.lists(finite, min_size=1, max_size=40) | st.lists(st.floats(-30, 30, width=16), min_size=1, max_size=40)


def tensor(row: list[float]) -> Tensor:
    """A row as float16 of shape (1, n)."""
    return torch.tensor([row], dtype=torch.float16)


@st.composite
def masked_rows(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Logits and a mask, both of shape (1, n); all may be masked."""
    row = draw(rows)
    mask = draw(st.lists(st.booleans(), min_size=len(row), max_size=len(row)))
    return tensor(row), torch.tensor([mask])


@untimed
@given(rows)
def test_softmax_is_the_exact_one_rounded_to_float16(row: list[float]) -> None:
    logits = tensor(row)
    result = stable.softmax(logits)
    assert result.dtype is torch.float16
    assert error_in_units(result, torch.softmax(logits.double(), 1)) < 0.51


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
@given(st.lists(finite, min_size=1, max_size=10), finite)
def test_an_exact_shift_of_all_logits_changes_no_bit(row: list[float], shift: float) -> None:
    logits = tensor(row)
    shifted = logits + shift
    assume(torch.equal(shifted.double(), logits.double() + shift))
    assert torch.equal(stable.softmax(shifted), stable.softmax(logits))
    assert torch.equal(stable.log_softmax(shifted), stable.log_softmax(logits))


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
    # float32 rounds each term of the row's sum by up to 2^-24 of it, in an order that depends on the processor.
    torch.testing.assert_close(ours.grad.double(), torchs.grad, atol=(len(row) + 2) * 2**-24, rtol=2**-10)


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
def test_the_cross_entropy_hides_no_overflow_before(bad: float, smoothing: float) -> None:
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
def test_wrong_input_of_the_cross_entropy_is_named(
    logits: Tensor, targets: Tensor, smoothing: float, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        stable.cross_entropy(logits, targets, label_smoothing=smoothing)


@pytest.fixture(scope="module")
def errors() -> dict[str, SoftmaxErrors]:
    return {row.case.title: row for row in map(measure, cases())}


def test_the_powers_of_float16_end_where_the_docstring_says() -> None:
    last, first_over = torch.tensor([11.0859375, 11.09375], dtype=torch.float16)
    assert last.exp().isfinite()
    assert first_over.exp().isinf()
    assert torch.tensor(-17.3).half().exp() > 0
    assert torch.tensor(-17.4).half().exp() == 0


def test_the_textbook_fails_on_all_but_the_harmless(errors: dict[str, SoftmaxErrors]) -> None:
    harmless = {title for title, row in errors.items() if row.naive < 1}
    assert harmless == {"ordinary logits", "a logit of 11"}
    assert errors["a class 18 behind"].naive == math.inf
    assert math.isnan(errors["a logit of 12"].naive)


def test_the_stable_functions_are_rounded_right_on_every_case(errors: dict[str, SoftmaxErrors]) -> None:
    assert all(row.stable <= 0.5 for row in errors.values())


def test_torchs_own_are_as_good_but_for_rows_without_an_entry(errors: dict[str, SoftmaxErrors]) -> None:
    assert {title for title, row in errors.items() if not row.torch <= 0.5} == {"no entry allowed"}


def test_computing_in_float16_is_stable_too_until_the_sum_overflows(errors: dict[str, SoftmaxErrors]) -> None:
    assert {title for title, row in errors.items() if not row.stable_in_float16 <= 1} == {"100,000 equal logits"}


def test_the_textbook_is_right_where_nothing_overflows() -> None:
    logits, targets = torch.randn(5, 7, dtype=torch.float64), torch.arange(5)
    torch.testing.assert_close(textbook_softmax(logits), torch.softmax(logits, 1))
    torch.testing.assert_close(textbook_cross_entropy(logits, targets), torch.nn.functional.cross_entropy(logits, targets))


@pytest.mark.parametrize(
    ("result", "exact", "units"),
    [
        (1.0, 1.0, 0.0),
        (1.0 + 2**-10, 1.0, 1.0),
        (2**-24, 0.0, 1.0),
        (math.inf, 1.0, math.inf),
        (-math.inf, -131008.0, 0.0),
        (-60000.0, -131008.0, math.inf),
    ],
)
def test_errors_are_counted_in_float16s_resolution(result: float, exact: float, units: float) -> None:
    as_double = torch.tensor([exact], dtype=torch.float64)
    assert error_in_units(torch.tensor([result], dtype=torch.float64), as_double) == units
    assert math.isnan(error_in_units(torch.tensor([math.nan]), as_double))


def test_the_command_prints_json_where_what_is_not_finite_is_null(errors: dict[str, SoftmaxErrors]) -> None:
    cases = json.loads(CliRunner().invoke(app, ["--json"]).stdout)["cases"]
    assert [case["logits"] for case in cases] == list(errors)
    assert (cases[2]["naive"], cases[2]["stable"]) == (None, pytest.approx(errors["a logit of 12"].stable))


def test_the_command_prints_a_table_that_fits_a_terminal(errors: dict[str, SoftmaxErrors]) -> None:
    printed = CliRunner().invoke(app, [])
    assert (printed.exit_code, printed.stderr) == (0, "")
    table = printed.stdout.splitlines()
    assert len(table) == 1 + len(errors) + 2
    assert "NaN" in next(line for line in table if "a logit of 12" in line)
    assert "infinite" in next(line for line in table if "a class 18 behind" in line)
