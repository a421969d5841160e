"""Failure classes 1 to 5 and 13: weights, norms, masks and epsilons whose numbers float16 does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.export.failure_classes.converters import FailureCase, case, tried
from tests.export.onnx_fp16.models import normal

# BatchNorm statistics and weights over 65504, which others clamp without a word.
STATISTICS: dict[str, Any] = {"scale": np.full(4, 3e4), "shift": normal(4), "mean": np.full(4, 1.5e3), "var": np.full(4, 9.8e7)}
ROWS = {"x": normal(5, 8)}
OVER_THE_RANGE = {
    "a variance over the range behind a convolution": case(
        """g (float[1, 3, 8, 8] x) => (float[1, 4, 8, 8] y) {
        c = Conv <pads = [1, 1, 1, 1]> (x, w) y = BatchNormalization (c, scale, shift, mean, var) }""",
        {"x": normal(1, 3, 8, 8)}, w=normal(4, 3, 3, 3, scale=600), **STATISTICS),
    "a variance over the range with nothing to fold into": case(
        """g (float[2, 4, 6, 6] x) => (float[2, 4, 6, 6] y) {
        r = Relu (x) y = BatchNormalization (r, scale, shift, mean, var) }""",
        {"x": normal(2, 4, 6, 6, scale=1000)}, **STATISTICS),
    "a matrix over the range": case(
        "g (float[N, 8] x) => (float[N, 8] y) { s = Mul (x, small) y = MatMul (s, w) }",
        ROWS, kept="y", w=normal(8, 8, scale=2e5), small=np.full(8, 2.0**-10)),
    "a factor over the range": case(
        "g (float[N, 8] x) => (float[N, 8] y) { s = Mul (x, tiny) y = Mul (s, large) }", ROWS, kept="y", tiny=1e-4, large=2e5),
    "a divisor over the range": case(
        "g (float[N, 8] x) => (float[N, 8] y) { s = Mul (x, thousand) y = Div (s, large) }",
        ROWS, kept="s y", thousand=1e3, large=2e5),
    "a constant node over the range": case(
        """g (float[N, 8] x) => (float[N, 8] y) {
        tiny = Constant <value_float = 0.0001> () large = Constant <value = float {300000.0}> ()
        s = Mul (x, tiny) y = Mul (s, large) }""", ROWS, kept="y"),
    "a matrix that vanishes": case(
        "g (float[N, 8] x) => (float[N, 8] y) { s = MatMul (x, w) t = Mul (s, large) y = Mul (t, large) }",
        ROWS, w=normal(8, 8, scale=1e-9), large=2.0**14),
    "a kernel of subnormal numbers": case(
        "g (float[1, 3, 6, 6] x) => (float[1, 4, 4, 4] y) { s = Conv (x, w) y = Mul (s, large) }",
        {"x": normal(1, 3, 6, 6)}, w=normal(4, 3, 3, 3, scale=2e-7), large=3e4),
}  # fmt: skip

# Squares, sums and norms whose parts float16 cannot hold though their results fit.
AXES = [-1]
WIDE = {"x": normal(4, 32, scale=900)}
PARTS: dict[str, Any] = {"two": 2.0, "epsilon": 1e-5, "gain": normal(32)}
NORM = """g (float[N, 32] x) => (float[N, 32] y) { m = ReduceMean <axes = [-1]> (x) d = Sub (x, m) q = SQUARE
    v = ReduceMean <axes = [-1]> (q) e = Add (v, epsilon) s = Sqrt (e) n = Div (d, s) g = Mul (n, gain) y = Add (g, shift) }"""
RMS = """g (float[N, 32] x) => (float[N, 32] y) { q = Pow (x, two) v = MEAN e = Add (v, epsilon) s = Sqrt (e)
    r = Reciprocal (s) n = Mul (x, r) y = Mul (n, gain) }"""
NORMS = {
    "a layer norm in parts by Pow": case(
        NORM.replace("SQUARE", "Pow (d, two)"), WIDE, {"x": normal(4, 32)}, shift=normal(32) + 1, **PARTS),
    "a layer norm in parts by Mul": case(
        NORM.replace("SQUARE", "Mul (d, d)"), WIDE, {"x": normal(4, 32)}, shift=normal(32) + 1, epsilon=1e-5, gain=normal(32)),
    "an RMS norm in parts": case(RMS.replace("MEAN", "ReduceMean <axes = [-1]> (q)"), WIDE, kept="q v e s r n y", **PARTS),
    "an RMS norm in parts of opset 23": case(
        RMS.replace("MEAN", "ReduceMean (q, axes)"), WIDE, kept="q v e s r n y", opset=23, ir=10, axes=AXES, **PARTS),
    "a length to divide by": case(
        "g (float[N, 32] x) => (float[N, 32] y) { q = Mul (x, x) t = ReduceSum (q, axes) l = Sqrt (t) y = Div (x, l) }",
        {"x": normal(4, 32, scale=300)}, kept="q t l y", axes=AXES),
    "a length to divide by from a sum of squares": case(
        "g (float[N, 32] x) => (float[N, 32] y) { t = ReduceSumSquare <axes = [-1]> (x) l = Sqrt (t) y = Div (x, l) }",
        {"x": normal(4, 32, scale=300)}, kept="t l y"),
    "a variance as the difference of two means": case(
        """g (float[N, 32] x) => (float[N, 1] y) { q = Mul (x, x) a = ReduceMean <axes = [-1]> (q)
        m = ReduceMean <axes = [-1]> (x) b = Mul (m, m) v = Sub (a, b) y = Sqrt (v) }""", WIDE, kept="q a m b v y"),
    "a softmax in parts": case(
        "g (float[N, 32] x) => (float[N, 32] y) { e = Exp (x) t = ReduceSum (e, axes) y = Div (e, t) }",
        {"x": normal(4, 32) + 11}, axes=AXES),
    # The cube of -60 is -216,000: -inf in float16, whose tanh is right; inf - inf and 0 * inf are what must not come of it.
    "a cubic GELU": case(
        """g (float[N, 32] x) => (float[N, 32] y) { c = Pow (x, three) s = Mul (c, small) a = Add (x, s) r = Mul (a, root)
        t = Tanh (r) o = Add (t, one) p = Mul (x, o) h = Mul (p, half) zero = Sub (c, c) y = Add (h, zero) }""",
        {"x": normal(4, 32, scale=60)}, kept="c s a r t zero y", three=3.0, small=0.044715, root=0.7978846, one=1.0, half=0.5),
}  # fmt: skip

# Masks made of numbers that float16 does not have, and rows that are masked from end to end.
LOWEST = float(np.finfo(np.float32).min)
MASK = np.array([[1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0, 0]], np.float32)
SCORES = {"x": normal(3, 8, scale=10), "mask": MASK}
ADDED = "hidden = Sub (one, mask) penalty = Mul (hidden, lowest)"
SOFTMAX = "y = Softmax <axis = -1> (scores)"
MASKED = "g (float[3, 8] x, float[3, 8] mask) => (float[3, 8] y)"
MASKS = {
    **{
        f"a mask of {lowest:.2g} is added": case(
            f"{MASKED} {{ {ADDED} scores = Add (x, penalty) {SOFTMAX} }}", SCORES, one=1.0, lowest=lowest)
        for lowest in (-1e12, -1e9, LOWEST)
    },
    **{
        f"two masks of {lowest:.2g} are added": case(
            f"{MASKED} {{ {ADDED} both = Add (penalty, constant) scores = Add (x, both) {SOFTMAX} }}",
            SCORES, one=1.0, lowest=lowest / 2, constant=np.where(MASK == 0, lowest / 2, 0))
        for lowest in (-1e12, LOWEST)
    },
    # A library that clamps to -10,000 lets the masked places win here.
    **{
        f"a mask of {lowest:.2g} is chosen beside scores under -10,000": case(
            f"g (float[3, 8] x, bool[3, 8] mask) => (float[3, 8] y) {{ scores = Where (mask, x, lowest) {SOFTMAX} }}",
            {"x": normal(3, 8) - 12000, "mask": MASK > 0}, lowest=lowest)
        for lowest in (-1e12, LOWEST)
    },
    "minus infinity that the model looks for": case(
        f"g (float[8, 8] x) => (float[8, 8] y, bool[8, 8] h) {{ scores = Add (x, mask) h = IsInf (scores) {SOFTMAX} }}",
        {"x": normal(8, 8)}, kept="h", mask=np.where(np.tri(8) == 0, -np.inf, 0)),
}  # fmt: skip

# Epsilons that vanish in float16, and scale pairs that overflow between their halves.
ZERO_AND_MORE = {"x": np.array([[0, 0, 1, 0.5]], np.float32)}
EPSILONS = {
    **{
        f"a logarithm of zero and {epsilon}": case(
            "g (float[N, 4] x) => (float[N, 4] y) { e = Add (x, epsilon) y = Log (e) }",
            ZERO_AND_MORE, kept="e y", epsilon=epsilon)
        for epsilon in (1e-8, 1e-12, 1e-20)
    },
    **{
        f"a logarithm above a floor by {op}": case(
            f"g (float[N, 4] x) => (float[N, 4] y) {{ e = {op} (x, epsilon) y = Log (e) }}",
            ZERO_AND_MORE, kept="e y", epsilon=1e-12)
        for op in ("Max", "Clip")
    },
    "a length of small numbers": case(
        """g (float[N, 16] x) => (float[N, 16] y) {
        q = Mul (x, x) t = ReduceSum (q, axes) e = Add (t, epsilon) l = Sqrt (e) y = Div (x, l) }""",
        {"x": normal(3, 16, scale=1e-4)}, {"x": np.zeros((1, 16), np.float32)}, kept="q t e l y", axes=AXES, epsilon=1e-12),
    "a difference divided by a small one": case(
        """g (float[N, 16] x) => (float[N, 1] y) { low = ReduceMin <axes = [-1]> (x) high = ReduceMax <axes = [-1]> (x)
        d = Sub (high, low) e = Add (d, epsilon) y = Div (d, e) }""",
        {"x": np.zeros((2, 16), np.float32)}, {"x": normal(2, 16, scale=1e-6)}, kept="low high d e y", epsilon=1e-8),
    "a scale pair": case(
        "g (float[N, 16] x) => (float[N, 16] y) { a = Mul (x, up) b = Relu (a) y = Div (b, up) }",
        {"x": normal(3, 16, scale=20)}, kept="a b y", up=3e5),
}  # fmt: skip

# Scattering with a reduction, for which ONNX Runtime's CPU has no float16 and puts no casts in.
UPDATED = {"x": normal(4, 3), "u": normal(2, 3) + 1}
SCATTERED = "g (float[4, 3] x, float[2, 3] u) => (float[4, 3] y)"
SCATTERING = {
    **{
        f"ScatterND by {reduction}": case(
            f'{SCATTERED} {{ r = Relu (x) s = ScatterND <reduction = "{reduction}"> (r, at, u) y = Neg (s) }}',
            UPDATED, kept="s", opset=18, at=[[1], [1]])
        for reduction in ("add", "mul", "max", "min")
    },
    **{
        f"ScatterElements by {reduction}": case(
            f'{SCATTERED} {{ r = Relu (x) s = ScatterElements <reduction = "{reduction}"> (r, at, u) y = Neg (s) }}',
            UPDATED, kept="s", opset=18, at=[[1, 2, 3], [1, 2, 3]])
        for reduction in ("add", "mul")
    },
}  # fmt: skip


@tried(OVER_THE_RANGE | NORMS | MASKS | EPSILONS | SCATTERING)
def test_numbers_that_float16_does_not_have(check: Callable[[FailureCase], None], case: FailureCase) -> None:
    check(case)
