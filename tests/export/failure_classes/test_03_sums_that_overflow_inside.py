"""Class 3: squares, sums and norms whose parts float16 cannot hold though their results fit."""

from __future__ import annotations

import numpy as np
import pytest

from tests.export.failure_classes.converters import Converter, both, normal, parse

TWO, EPSILON = np.float32(2), np.float32(1e-5)
GAIN, SHIFT = normal(32), normal(32, seed=1)
AXES = np.array([-1], np.int64)


@both
@pytest.mark.parametrize("square", ["Pow (d, two)", "Mul (d, d)"])
def test_a_layer_norm_in_parts(square: str, converter: Converter) -> None:
    model = parse(f"""g (float[N, 32] x) => (float[N, 32] y) {{
        m = ReduceMean <axes = [-1]> (x)
        d = Sub (x, m)
        q = {square}
        v = ReduceMean <axes = [-1]> (q)
        e = Add (v, epsilon)
        s = Sqrt (e)
        n = Div (d, s)
        g = Mul (n, gain)
        y = Add (g, shift) }}""", two=TWO, epsilon=EPSILON, gain=GAIN, shift=SHIFT)  # fmt: skip
    converter.try_on(model, {"x": normal(4, 32, scale=900)}, {"x": normal(4, 32)})


@both
@pytest.mark.parametrize("opset", [17, 23])
def test_an_rms_norm_in_parts(opset: int, converter: Converter) -> None:
    reduce = "ReduceMean <axes = [-1]> (q)" if opset < 18 else "ReduceMean (q, axes)"
    extra = {} if opset < 18 else {"axes": AXES}
    model = parse(f"""g (float[N, 32] x) => (float[N, 32] y) {{
        q = Pow (x, two)
        v = {reduce}
        e = Add (v, epsilon)
        s = Sqrt (e)
        r = Reciprocal (s)
        n = Mul (x, r)
        y = Mul (n, gain) }}""", opset, 10 if opset > 20 else 8, two=TWO, epsilon=EPSILON, gain=GAIN, **extra)  # fmt: skip
    converter.try_on(model, {"x": normal(4, 32, scale=900)})


@both
@pytest.mark.parametrize(("total", "power"), [("ReduceSumSquare <axes = [-1]>", 2), ("ReduceSum", 1)])
def test_a_length_to_divide_by(total: str, power: int, converter: Converter) -> None:
    argument = "(x)" if power == 2 else "(q, axes)"
    square = "" if power == 2 else "q = Mul (x, x)"
    extra = {} if power == 2 else {"axes": AXES}
    model = parse(f"""g (float[N, 32] x) => (float[N, 32] y) {{ {square}
        t = {total} {argument}
        l = Sqrt (t)
        y = Div (x, l) }}""", **extra)  # fmt: skip
    converter.try_on(model, {"x": normal(4, 32, scale=300)})


@both
def test_a_variance_as_the_difference_of_two_means(converter: Converter) -> None:
    model = parse("""g (float[N, 32] x) => (float[N, 1] y) {
        q = Mul (x, x)
        a = ReduceMean <axes = [-1]> (q)
        m = ReduceMean <axes = [-1]> (x)
        b = Mul (m, m)
        v = Sub (a, b)
        y = Sqrt (v) }""")
    converter.try_on(model, {"x": normal(4, 32, scale=900)})


@both
def test_a_softmax_in_parts(converter: Converter) -> None:
    model = parse("""g (float[N, 32] x) => (float[N, 32] y) {
        e = Exp (x)
        t = ReduceSum (e, axes)
        y = Div (e, t) }""", axes=AXES)  # fmt: skip
    converter.try_on(model, {"x": normal(4, 32) + 11})


@both
def test_a_cubic_gelu(converter: Converter) -> None:
    model = parse("""g (float[N, 32] x) => (float[N, 32] y) {
        c = Pow (x, three)
        s = Mul (c, small)
        a = Add (x, s)
        r = Mul (a, root)
        t = Tanh (r)
        o = Add (t, one)
        p = Mul (x, o)
        y = Mul (p, half) }""", three=np.float32(3), small=np.float32(0.044715),
        root=np.float32(0.7978846), one=np.float32(1), half=np.float32(0.5))  # fmt: skip
    # The cube of -60 is -216,000: -inf in float16, whose tanh is right; inf - inf and 0 * inf are what must not come of it.
    model.graph.node.add(op_type="Sub", input=["c", "c"], output=["zero"])
    model.graph.node.add(op_type="Add", input=["y", "zero"], output=["z"])
    model.graph.output[0].name = "z"
    converter.try_on(model, {"x": normal(4, 32, scale=60)})
