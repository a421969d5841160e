"""Class 10: sizes that are computed in floats and must stay exact."""

from __future__ import annotations

import numpy as np

from tests.export.failure_classes.converters import Converter, both, both_all, normal, parse


@both
def test_a_size_over_2048_in_a_reshape(converter: Converter) -> None:
    model = parse("""g (float[1, N] x) => (float[M] y) {
        s = Shape (x)
        n = Gather (s, last)
        f = Cast <to = 1> (n)
        one = Div (f, unit)
        whole = Floor (one)
        size = Cast <to = 7> (whole)
        r = Relu (x)
        y = Reshape (r, size) }""", last=np.array([1], np.int64), unit=np.array([1], np.float32))  # fmt: skip
    converter.try_on(model, {"x": normal(1, 4099)})


@both
def test_the_end_of_a_slice(converter: Converter) -> None:
    model = parse("""g (float[1, N] x) => (float[1, M] y) {
        s = Shape (x)
        n = Gather (s, last)
        f = Cast <to = 1> (n)
        half = Mul (f, part)
        up = Ceil (half)
        end = Cast <to = 7> (up)
        r = Relu (x)
        y = Slice (r, start, end, last) }""",
        last=np.array([1], np.int64), start=np.array([0], np.int64), part=np.array([0.7], np.float32))  # fmt: skip
    converter.try_on(model, {"x": normal(1, 5003)}, {"x": normal(1, 10)})


@both_all
def test_the_scales_of_a_resize(converter: Converter) -> None:
    model = parse("""g (float[1, 1, H, W] x, float[1, 1, P, Q] like) => (float[1, 1, P, Q] y) {
        a = Shape (x)
        b = Shape (like)
        f = Cast <to = 1> (a)
        g = Cast <to = 1> (b)
        scales = Div (g, f)
        r = Relu (x)
        y = Resize <mode = "nearest"> (r, , scales) }""")
    converter.try_on(model, {"x": normal(1, 1, 2, 700), "like": normal(1, 1, 4, 2099)})


@both
def test_positions_counted_in_floats(converter: Converter) -> None:
    model = parse("""g (float[1, N] x) => (float[1, N] y) {
        s = Shape (x)
        n = Gather (s, last)
        f = Cast <to = 1> (n)
        places = Range (zero, f, one)
        i = Cast <to = 7> (places)
        r = Relu (x)
        y = Gather <axis = 1> (r, i) }""",
        last=np.array(1, np.int64), zero=np.array(0, np.float32), one=np.array(1, np.float32))  # fmt: skip
    converter.try_on(model, {"x": normal(1, 3001)})


@both
def test_indices_computed_in_floats(converter: Converter) -> None:
    model = parse("""g (float[1, N] x, int64[K] at) => (float[1, K] y) {
        f = Cast <to = 1> (at)
        half = Mul (f, part)
        down = Floor (half)
        i = Cast <to = 7> (down)
        r = Relu (x)
        y = Gather <axis = 1> (r, i) }""", part=np.array(0.5, np.float32))  # fmt: skip
    converter.try_on(model, {"x": normal(1, 4000), "at": np.array([5001, 7003, 4099], np.int64)})
