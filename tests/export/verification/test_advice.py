from __future__ import annotations

import re

import numpy as np
import onnx
import pytest

from export.certificate.budget import Budget
from export.certificate.certificate import BudgetExceeded
from export.verification.metrics import Array
from export.verification.verify import verify

ROWS = 108
NEAR = "output 'y' (rounded): agreement 0.9815 (limit 0.9950): 2 of 108 rows differ (and 1 more over budget)"
NEARER = "float32's two numbers are closer than the error that is allowed"
NUMBERS = f"where they differ, {NEARER}, so verify on other or more samples, "


def model(shift: float) -> onnx.ModelProto:
    """y = x, the first class larger by a shift, and the second smaller."""
    text = f"(float[N, 2] x) => (float[N, 2] y) {{ s = Constant<value_floats = [{shift}, {-shift}]>() y = Add(x, s) }}"
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> g {text}')


def close(count: int, apart: float) -> Array:
    """Samples of the second class, which some of them are only just."""
    x = np.tile(np.array([0.0, 1.0], np.float32), (ROWS, 1))
    x[:count, 0] = 1 - apart
    return x


def message(x: Array) -> str:
    with pytest.raises(BudgetExceeded) as caught:
        verify(model(0.0), model(0.008), x, adversarial=False)
    return str(caught.value)


def test_rows_that_are_near_ties_are_told_with_the_option_that_allows_them() -> None:
    x = close(2, 0.004)
    text = message(x)
    assert text.startswith(f"{NEAR}; {NUMBERS}keep sensitive layers in float32 (")
    share = re.search(r"or allow it \(--min-agreement ([0-9.]+)\)$", text)
    assert share is not None
    assert verify(model(0.0), model(0.008), x, budget=Budget(min_agreement=float(share[1])), adversarial=False).passed


def test_rows_that_float32_is_sure_of_are_told_without_a_number() -> None:
    text = message(close(2, 0.0125))
    assert text.startswith(f"{NEAR}; keep sensitive layers in float32 (")
    assert text.endswith(") or allow more rows to differ (--min-agreement)")


def test_a_lone_near_tie_passes_and_is_noted() -> None:
    certificate = verify(model(0.0), model(0.008), close(1, 0.004), adversarial=False)
    assert [round(verdict.figures.agreement or 0, 4) for verdict in certificate.outputs] == [0.9907, 0.9907]
    noted = "differs in the argmax of 1 of 108 rows, which is a near-tie: float32's two numbers there are 0.004 apart"
    assert [note for note in certificate.notes if noted in note] == [
        f"output 'y' ({run}) {noted}, and an error of 0.01 is allowed" for run in ("rounded", "runtime")
    ]
