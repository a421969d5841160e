"""Class 11: positions times frequencies, whose sine needs the angle to a fraction of a turn."""

from __future__ import annotations

import numpy as np
import pytest

from tests.export.failure_classes.converters import Converter, both, normal, parse

INVERSE_FREQUENCIES = (10000.0 ** (-np.arange(0, 32, 2) / 32)).astype(np.float32)


@both
@pytest.mark.parametrize("wave", ["Cos", "Sin"])
def test_rotary_angles_of_far_positions(wave: str, converter: Converter) -> None:
    model = parse(f"""g (float[N, 16] x, int64[N, 1] positions) => (float[N, 16] y) {{
        f = Cast <to = 1> (positions)
        angles = Mul (f, inverse)
        w = {wave} (angles)
        y = Mul (x, w) }}""", inverse=INVERSE_FREQUENCIES)  # fmt: skip
    converter.try_on(model, {"x": normal(4, 16), "positions": np.array([[3], [2049], [4097], [9001]], np.int64)})


@both
def test_rotary_angles_by_a_matrix_product(converter: Converter) -> None:
    model = parse("""g (float[N, 32] x, int64[N, 1] positions) => (float[N, 32] y) {
        f = Cast <to = 1> (positions)
        angles = MatMul (f, inverse)
        both = Concat <axis = -1> (angles, angles)
        c = Cos (both)
        s = Sin (both)
        a = Mul (x, c)
        b = Mul (x, s)
        y = Add (a, b) }""", inverse=INVERSE_FREQUENCIES[None])  # fmt: skip
    converter.try_on(model, {"x": normal(3, 32), "positions": np.array([[1], [3001], [8191]], np.int64)})


@both
def test_a_range_of_positions(converter: Converter) -> None:
    model = parse("""g (float[N, 16] x) => (float[N, 16] y) {
        shape = Shape (x)
        n = Gather (shape, first)
        counted = Range (zero, n, one)
        f = Cast <to = 1> (counted)
        column = Unsqueeze (f, axes)
        angles = Mul (column, inverse)
        s = Sin (angles)
        y = Add (x, s) }""",
        inverse=INVERSE_FREQUENCIES, first=np.array(0, np.int64), zero=np.array(0, np.int64), one=np.array(1, np.int64),
        axes=np.array([1], np.int64))  # fmt: skip
    converter.try_on(model, {"x": normal(3000, 16, scale=0.1)})


@both
def test_a_table_of_positions(converter: Converter) -> None:
    table = np.arange(6000, dtype=np.float32)
    model = parse("""g (float[N, 16] x, int64[N] at) => (float[N, 16] y) {
        f = Gather (table, at)
        column = Unsqueeze (f, axes)
        angles = Mul (column, inverse)
        c = Cos (angles)
        y = Mul (x, c) }""", table=table, inverse=INVERSE_FREQUENCIES, axes=np.array([1], np.int64))  # fmt: skip
    converter.try_on(model, {"x": normal(3, 16), "at": np.array([7, 2051, 5003], np.int64)})
