"""Class 1: BatchNorm statistics and weights over 65504, which others clamp without a word."""

from __future__ import annotations

import numpy as np
import pytest

from tests.export.failure_classes.converters import Converter, both, normal, parse

STATISTICS = {"scale": np.full(4, 3e4), "shift": normal(4), "mean": np.full(4, 1.5e3), "var": np.full(4, 9.8e7)}
F32 = {name: array.astype(np.float32) for name, array in STATISTICS.items()}


@both
def test_a_variance_over_the_range_behind_a_convolution(converter: Converter) -> None:
    model = parse(
        """g (float[1, 3, 8, 8] x) => (float[1, 4, 8, 8] y) {
        c = Conv <pads = [1, 1, 1, 1]> (x, w)
        y = BatchNormalization (c, scale, shift, mean, var) }""",
        w=normal(4, 3, 3, 3, scale=600),
        **F32,
    )
    converter.try_on(model, {"x": normal(1, 3, 8, 8)})


@both
def test_a_variance_over_the_range_with_nothing_to_fold_into(converter: Converter) -> None:
    model = parse(
        """g (float[2, 4, 6, 6] x) => (float[2, 4, 6, 6] y) {
        r = Relu (x)
        y = BatchNormalization (r, scale, shift, mean, var) }""",
        **F32,
    )
    converter.try_on(model, {"x": normal(2, 4, 6, 6, scale=1000)})


@both
def test_a_matrix_over_the_range(converter: Converter) -> None:
    model = parse("g (float[N, 8] x) => (float[N, 8] y) { s = Mul (x, small) y = MatMul (s, w) }",
        w=normal(8, 8, scale=2e5), small=np.full(8, 2.0**-10, np.float32))  # fmt: skip
    converter.try_on(model, {"x": normal(5, 8)})


@both
@pytest.mark.parametrize("op", ["Mul", "Div"])
def test_a_scalar_over_the_range(op: str, converter: Converter) -> None:
    first = "Mul (x, tiny)" if op == "Mul" else "Mul (x, thousand)"
    model = parse(f"g (float[N, 8] x) => (float[N, 8] y) {{ s = {first} y = {op} (s, large) }}",
        tiny=np.float32(1e-4), thousand=np.float32(1e3), large=np.float32(2e5))  # fmt: skip
    converter.try_on(model, {"x": normal(5, 8)})


@both
def test_a_constant_node_over_the_range(converter: Converter) -> None:
    model = parse("""g (float[N, 8] x) => (float[N, 8] y) {
        tiny = Constant <value_float = 0.0001> ()
        large = Constant <value = float {300000.0}> ()
        s = Mul (x, tiny)
        y = Mul (s, large) }""")
    converter.try_on(model, {"x": normal(5, 8)})
