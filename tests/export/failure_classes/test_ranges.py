from __future__ import annotations

import numpy as np
import pytest

from tests.export.failure_classes.converters import Converter, both, normal, parse

# Class 3: squares, sums and norms whose parts float16 cannot hold though their results fit.

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


# Class 4: masks made of numbers that float16 does not have, and rows that are masked from end to end.

LOWEST = np.finfo(np.float32).min
MASK = np.array([[1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0, 0]], np.float32)


@both
@pytest.mark.parametrize("lowest", [-1e12, -1e9, LOWEST])
def test_an_added_mask(lowest: float, converter: Converter) -> None:
    model = parse("""g (float[3, 8] x, float[3, 8] mask) => (float[3, 8] y) {
        hidden = Sub (one, mask)
        penalty = Mul (hidden, lowest)
        scores = Add (x, penalty)
        y = Softmax <axis = -1> (scores) }""",
        one=np.float32(1), lowest=np.float32(lowest))  # fmt: skip
    converter.try_on(model, {"x": normal(3, 8, scale=10), "mask": MASK})


@both
@pytest.mark.parametrize("lowest", [-1e12, LOWEST])
def test_two_masks_added(lowest: float, converter: Converter) -> None:
    constant = np.where(MASK == 0, np.float32(lowest) / 2, np.float32(0)).astype(np.float32)
    model = parse("""g (float[3, 8] x, float[3, 8] mask) => (float[3, 8] y) {
        hidden = Sub (one, mask)
        penalty = Mul (hidden, lowest)
        both = Add (penalty, constant)
        scores = Add (x, both)
        y = Softmax <axis = -1> (scores) }""",
        one=np.float32(1), lowest=np.float32(lowest / 2), constant=constant)  # fmt: skip
    converter.try_on(model, {"x": normal(3, 8, scale=10), "mask": MASK})


@both
@pytest.mark.parametrize("lowest", [-1e12, LOWEST])
def test_a_chosen_mask_beside_scores_under_minus_ten_thousand(lowest: float, converter: Converter) -> None:
    model = parse("""g (float[3, 8] x, bool[3, 8] mask) => (float[3, 8] y) {
        scores = Where (mask, x, lowest)
        y = Softmax <axis = -1> (scores) }""", lowest=np.float32(lowest))  # fmt: skip
    # A library that clamps to -10,000 lets the masked places win here.
    converter.try_on(model, {"x": normal(3, 8) - 12000, "mask": MASK > 0})


@both
def test_minus_infinity_that_the_model_looks_for(converter: Converter) -> None:
    constant = np.where(np.tri(8) == 0, -np.inf, 0).astype(np.float32)
    model = parse("""g (float[8, 8] x) => (float[8, 8] y, bool[8, 8] hidden) {
        scores = Add (x, mask)
        hidden = IsInf (scores)
        y = Softmax <axis = -1> (scores) }""", mask=constant)  # fmt: skip
    converter.try_on(model, {"x": normal(8, 8)})


# Class 5: epsilons that vanish in float16, and scale pairs that overflow between their halves.


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
