"""Patterns that float16 breaks, rounded after every node: wrong without repairs, right with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from export.verification.simulation import round_every_node
from tests.export.onnx_fp16.models import halve, parse
from tests.export.onnx_fp16.repair.same import answers

Array = np.ndarray[Any, Any]
RANDOM = np.random.default_rng(0)
NUMBERS = RANDOM.standard_normal((3, 8)).astype(np.float32)
FREQUENCIES = 10000.0 ** -(np.arange(8) / 8)
ZEROS = np.zeros((3, 8), np.float32)
EPSILON = {"eps": np.array(1e-8)}
POWER = "q = Pow (x, two) v = ReduceMean (q, last) e = Add (v, eps) r = Pow (e, power) n = Mul (x, r)"
POWERS = {"two": np.array(2.0), "last": np.array([-1]), "power": np.array(-0.5)}


def survives(model: onnx.ModelProto, x: Array, *, repair: bool) -> bool:
    """Whether the model, converted, gives what it gave before within 1 % of the largest number."""
    (wanted,) = answers(model, {"x": x})
    (found,) = answers(round_every_node(halve(model, repair=repair)[0]), {"x": x})
    return bool(np.allclose(found, wanted, rtol=0, atol=1e-2 * float(np.abs(wanted).max())))


@pytest.mark.parametrize(
    "path",
    [
        "k = Identity (eps)",
        "k = Unsqueeze (eps, place)",
        "k = CastLike (eps, x)",
        "k = Expand (eps, size)",
        "k = Reshape (eps, size)",
        "k = Mul (eps, one)",
        "k = ConstantOfShape <value = float[1] {1e-8}> (size)",
        "d = Cast <to = 11> (eps) k = Cast <to = 1> (d)",
    ],
)
def test_an_epsilon_is_seen_through_what_hands_it_on(path: str) -> None:
    known = {**EPSILON, "place": np.array([0]), "size": np.array([1]), "one": np.array(1.0)}
    used: dict[str, Any] = {name: array for name, array in known.items() if name in path}
    model = parse(f"g (float[3, 8] x) => (float[3, 8] y) {{ {path} e = Add (x, k) y = Log (e) }}", **used)
    assert not survives(model, ZEROS, repair=False)
    assert survives(model, ZEROS, repair=True)


BROKEN: dict[str, tuple[str, dict[str, Array], Array]] = {
    "a chosen epsilon": (
        "z = Equal (x, zero) e = Where (z, eps, x) y = Log (e)",
        {**EPSILON, "zero": np.array(0.0)},
        np.abs(NUMBERS) * (NUMBERS > 0),
    ),
    "softplus": ("e = Exp (x) o = Add (e, one) y = Log (o)", {"one": np.array(1.0)}, NUMBERS * 20),
    "a tanh of exponentials": (
        "p = Exp (x) m = Neg (x) q = Exp (m) a = Sub (p, q) b = Add (p, q) y = Div (a, b)", {}, NUMBERS * 20,
    ),
    "a logarithm of a softmax": (
        "e = Exp (x) t = ReduceSum (e, last) l = Log (t) y = Sub (x, l)", {"last": np.array([-1])}, NUMBERS * 10,
    ),
    "the power -0.5, with an epsilon that float16 holds": (
        f"{POWER} y = Relu (n)", {**POWERS, "eps": np.array(1e-3)}, NUMBERS * 900,
    ),
    "the power -0.5 in a long residual network": (
        f"{POWER} a0 = Add (n, n) " + " ".join(f"a{i + 1} = Add (a{i}, n)" for i in range(60)) + " y = Relu (a60)",
        {**POWERS, "eps": np.array(1e-6)},
        NUMBERS * 900,
    ),
    "a time step's sine": ("a = Mul (x, rates) y = Sin (a)", {"rates": FREQUENCIES}, np.full((3, 8), 999.3, np.float32)),
    "a factor for each channel": (
        "h = MatMul (x, w) y = Mul (h, s)",
        {"w": RANDOM.standard_normal((8, 8)) * 3e4, "s": RANDOM.uniform(1e-7, 3e-7, 8)},
        NUMBERS * 30,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_breaks_alone_is_right_when_repaired(name: str) -> None:
    text, weights, x = BROKEN[name]
    given: dict[str, Any] = dict(weights)
    model = parse(f"g (float[3, 8] x) => (float[3, 8] y) {{ {text} }}", **given)
    assert not survives(model, x.astype(np.float32), repair=False)
    assert survives(model, x.astype(np.float32), repair=True)


def test_a_gelu_that_was_limited_is_float16() -> None:
    model = parse(
        """g (float[3, 8] x) => (float[3, 8] y) { c = Pow (x, three) k = Mul (c, cubic) s = Add (x, k) t = Mul (s, root)
        h = Tanh (t) o = Add (h, one) y = Mul (x, o) }""",
        three=np.array(3.0), cubic=np.array(0.044715), root=np.array(0.79788), one=np.array(1.0),
    )  # fmt: skip
    assert survives(model, NUMBERS * 60, repair=True)
    assert not halve(model, repair=True)[1].kept


@pytest.mark.parametrize("shape", [(4, 1, 1), (1, 4, 1, 1)])
@pytest.mark.parametrize("operator", ["Mul", "Div"])
def test_a_norm_that_was_taken_apart_goes_into_its_convolution(shape: tuple[int, ...], operator: str) -> None:
    random = np.random.default_rng(1)
    scale = random.uniform(1e-7, 3e-7, shape)
    model = parse(
        f"g (float[2, 4, 6, 6] x) => (float[2, 4, 6, 6] y) {{ c = Conv (x, w) m = {operator} (c, s) y = Add (m, b) }}",
        w=random.standard_normal((4, 4, 1, 1)) * 3e4, s=scale if operator == "Mul" else 1 / scale, b=np.full((4, 1, 1), 1e-2),
    )  # fmt: skip
    x = random.standard_normal((2, 4, 6, 6)).astype(np.float32) * 30
    assert operator == "Div" or not survives(model, x, repair=False)  # a divisor over the range is kept in float32
    assert survives(model, x, repair=True)
    assert not halve(model, repair=True)[1].kept


def test_a_factor_that_adds_an_axis_stays() -> None:
    model = parse(
        "g (float[3, 8] x) => (float[1, 3, 8] y) { h = MatMul (x, w) y = Mul (h, s) }",
        w=np.ones((8, 8)) * 1e-9, s=np.full((1, 1, 1), 1e9),
    )  # fmt: skip
    half, report = halve(model, repair=True)
    onnx.checker.check_model(half, full_check=True)
    assert "fold-scale" not in [repair.pass_name for repair in report.repairs]
