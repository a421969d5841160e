"""The demonstration tells the truth: where the textbook fails, and that the stable functions do not."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from examples.stable_softmax import naive
from examples.stable_softmax.__main__ import app
from examples.stable_softmax.demonstration import Errors, error_in_units, measure_all
from tests.examples.running import run_example


@pytest.fixture(scope="module")
def errors() -> dict[str, Errors]:
    return {row.case.title: row for row in measure_all()}


def test_the_powers_of_float16_end_where_the_docstring_says() -> None:
    last, first_over = torch.tensor([11.0859375, 11.09375], dtype=torch.float16)
    assert last.exp().isfinite()
    assert first_over.exp().isinf()
    assert torch.tensor(-17.3).half().exp() > 0
    assert torch.tensor(-17.4).half().exp() == 0


def test_the_textbook_fails_on_all_but_the_harmless(errors: dict[str, Errors]) -> None:
    harmless = {title for title, row in errors.items() if row.naive < 1}
    assert harmless == {"ordinary logits", "a logit of 11"}
    assert errors["a class 18 behind"].naive == math.inf
    assert math.isnan(errors["a logit of 12"].naive)


def test_the_stable_functions_are_rounded_right_on_every_case(errors: dict[str, Errors]) -> None:
    assert all(row.stable <= 0.5 for row in errors.values())


def test_torchs_own_are_as_good_but_for_rows_without_an_entry(errors: dict[str, Errors]) -> None:
    assert {title for title, row in errors.items() if not row.torch <= 0.5} == {"no entry allowed"}


def test_computing_in_float16_is_stable_too_until_the_sum_overflows(errors: dict[str, Errors]) -> None:
    assert {title for title, row in errors.items() if not row.stable_in_float16 <= 1} == {"100,000 equal logits"}


def test_the_textbook_is_right_where_nothing_overflows() -> None:
    logits, targets = torch.randn(5, 7, dtype=torch.float64), torch.arange(5)
    torch.testing.assert_close(naive.softmax(logits), torch.softmax(logits, 1))
    torch.testing.assert_close(naive.cross_entropy(logits, targets), torch.nn.functional.cross_entropy(logits, targets))


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


def test_the_command_prints_json_where_what_is_not_finite_is_null(errors: dict[str, Errors]) -> None:
    cases = json.loads(CliRunner().invoke(app, ["--json"]).stdout)["cases"]
    assert [case["logits"] for case in cases] == list(errors)
    assert (cases[2]["naive"], cases[2]["stable"]) == (None, pytest.approx(errors["a logit of 12"].stable))


def test_the_command_prints_a_table_that_fits_a_terminal(tmp_path: Path, errors: dict[str, Errors]) -> None:
    printed = run_example("stable_softmax", folder=tmp_path)
    assert (printed.returncode, printed.stderr) == (0, "")
    table = printed.stdout.splitlines()
    assert len(table) == 1 + len(errors) + 2
    assert "NaN" in next(line for line in table if "a logit of 12" in line)
    assert "infinite" in next(line for line in table if "a class 18 behind" in line)
