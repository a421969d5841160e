"""Class 5: epsilons that vanish in float16, and scale pairs that overflow between their halves."""

from __future__ import annotations

import numpy as np
import pytest

from tests.export.failure_classes.converters import Converter, both, normal, parse

AXES = np.array([-1], np.int64)


@both
@pytest.mark.parametrize("epsilon", [1e-8, 1e-12, 1e-20])
def test_a_logarithm_of_zero_and_epsilon(epsilon: float, converter: Converter) -> None:
    model = parse("g (float[N, 4] x) => (float[N, 4] y) { e = Add (x, epsilon) y = Log (e) }", epsilon=np.float32(epsilon))
    converter.try_on(model, {"x": np.array([[0, 0, 1, 0.5]], np.float32)})


@both
@pytest.mark.parametrize("op", ["Max (x, epsilon)", "Clip (x, epsilon)"])
def test_a_logarithm_above_a_floor(op: str, converter: Converter) -> None:
    model = parse(f"g (float[N, 4] x) => (float[N, 4] y) {{ e = {op} y = Log (e) }}", epsilon=np.float32(1e-12))
    converter.try_on(model, {"x": np.array([[0, 0, 1, 0.5]], np.float32)})


@both
def test_a_length_of_small_numbers(converter: Converter) -> None:
    model = parse("""g (float[N, 16] x) => (float[N, 16] y) {
        q = Mul (x, x)
        t = ReduceSum (q, axes)
        e = Add (t, epsilon)
        l = Sqrt (e)
        y = Div (x, l) }""", axes=AXES, epsilon=np.float32(1e-12))  # fmt: skip
    converter.try_on(model, {"x": normal(3, 16, scale=1e-4)}, {"x": np.zeros((1, 16), np.float32)})


@both
def test_a_difference_divided_by_a_small_one(converter: Converter) -> None:
    model = parse("""g (float[N, 16] x) => (float[N, 1] y) {
        low = ReduceMin <axes = [-1]> (x)
        high = ReduceMax <axes = [-1]> (x)
        d = Sub (high, low)
        e = Add (d, epsilon)
        y = Div (d, e) }""", epsilon=np.float32(1e-8))  # fmt: skip
    converter.try_on(model, {"x": np.zeros((2, 16), np.float32)}, {"x": normal(2, 16, scale=1e-6)})


@both
def test_a_scale_pair(converter: Converter) -> None:
    model = parse("g (float[N, 16] x) => (float[N, 16] y) { a = Mul (x, up) b = Relu (a) y = Div (b, up) }", up=np.float32(3e5))
    converter.try_on(model, {"x": normal(3, 16, scale=20)})
