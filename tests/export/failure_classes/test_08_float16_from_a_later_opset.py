"""Class 8: operators that take float16 only from an opset later than the model's."""

from __future__ import annotations

import numpy as np
import pytest

from tests.export.failure_classes.converters import Converter, both, both_all, normal, parse

X = {"x": normal(2, 8)}


@both
@pytest.mark.parametrize("opset", [12, 17])
def test_celu(opset: int, converter: Converter) -> None:
    model = parse("g (float[2, 8] x) => (float[2, 8] y) { r = Neg (x) c = Celu <alpha = 2.0> (r) y = Neg (c) }", opset)
    converter.try_on(model, X)


@both_all
def test_range(converter: Converter) -> None:
    model = parse("g (float[2, 8] x) => (float[2, 8] y) { r = Range (start, limit, step) y = Mul (x, r) }",
        start=np.float32(0), limit=np.float32(4), step=np.float32(0.5))  # fmt: skip
    converter.try_on(model, X)


@both_all
def test_cumulative_sums(converter: Converter) -> None:
    model = parse("g (float[2, 8] x) => (float[2, 8] y) { r = Relu (x) c = CumSum (r, axis) y = Neg (c) }",
        13, axis=np.array(1, np.int64))  # fmt: skip
    converter.try_on(model, X)


@both
def test_is_inf(converter: Converter) -> None:
    model = parse("""g (float[2, 8] x) => (float[2, 8] y) {
        r = Relu (x)
        i = IsInf (r)
        y = Where (i, zero, r) }""", 13, zero=np.float32(0))  # fmt: skip
    converter.try_on(model, X)
