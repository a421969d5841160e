from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest

from benchmarks.converters.runtime import Session
from export.onnx_fp16.planning import reasons as rules
from export.onnx_fp16.planning.integer_products import ADDEND_REASON
from export.onnx_fp16.planning.quantized_layers import REASON
from export.verification.metrics import compare
from export.verification.simulation import round_every_node
from tests.export.onnx_fp16.models import clean_both_ways, halve, judged, normal, parse, reasons

WIDTH = 32
LAYERS = 16


def quantized(source: str, number: int, weights: dict[str, Any]) -> tuple[str, str]:
    """A layer as `quantize_dynamic` writes it, as text, and the name of its result."""
    w = np.random.default_rng(number).normal(scale=0.4, size=(WIDTH, WIDTH))
    scale = np.abs(w).max() / 127
    weights |= {f"w{number}": np.round(w / scale).astype(np.int8), f"s{number}": np.float32(scale)}
    n = number
    return (
        f"""q{n}, a{n}, z{n} = DynamicQuantizeLinear ({source}) m{n} = MatMulInteger (q{n}, w{n}, z{n})
        f{n} = Cast <to = 1> (m{n}) k{n} = Mul (a{n}, s{n}) h{n} = Mul (f{n}, k{n})""",
        f"h{n}",
    )


def swish(source: str, number: int) -> tuple[str, str]:
    return f"g{number} = Sigmoid ({source}) x{number} = Mul ({source}, g{number})", f"x{number}"


def deep() -> onnx.ModelProto:
    """Quantized layers with swish between, and a bias and a relu at the end."""
    weights: dict[str, Any] = {"bias": normal(WIDTH)}
    text, value = "", "x"
    for number in range(LAYERS):
        layer, value = quantized(value, number, weights)
        between, value = swish(value, number) if number < LAYERS - 1 else ("", value)
        text += layer + between
    return parse(
        f"g (float[N, {WIDTH}] x) => (float[N, {WIDTH}] y) {{ {text} b = Add ({value}, bias) y = LeakyRelu (b) }}", **weights
    )


def error(model: onnx.ModelProto, converted: onnx.ModelProto, feeds: Mapping[str, Any]) -> float:
    """Of the converted model with every node rounded, in units of the largest answer."""
    simulated = Session(round_every_node(converted).SerializeToString(), "ORT_DISABLE_ALL").run(dict(feeds))
    return compare(Session(model.SerializeToString()).run(dict(feeds))[0], simulated[0]).max_scaled_error


def test_what_lies_between_quantized_layers_stays_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    model, feeds = deep(), {"x": normal(8, WIDTH)}
    clean_both_ways(model, feeds)
    converted, report = halve(model)
    kept = reasons(report)
    assert {name for name, reason in kept.items() if reason == REASON} == {f"{v}{n}" for v in "gx" for n in range(LAYERS - 1)}
    assert {"b", "y"}.isdisjoint(kept)
    assert error(model, converted, feeds) <= 1e-3
    monkeypatch.setattr(rules, "nodes_between", lambda _: [])
    assert error(model, halve(model)[0], feeds) > 0.01


def test_a_layer_with_float_weights_between_quantized_ones_is_float16() -> None:
    weights: dict[str, Any] = {"wide": normal(WIDTH, WIDTH, scale=0.2)}
    first, a = quantized("x", 0, weights)
    second, b = quantized("t", 1, weights)
    middle = f"r = Relu ({a}) m = MatMul (r, wide) t = Tanh (m)"
    model = parse(f"g (float[N, {WIDTH}] x) => (float[N, {WIDTH}] y) {{ {first} {middle} {second} y = Neg ({b}) }}", **weights)
    converted, report = halve(model)
    assert {"r", "m", "t", "y"}.isdisjoint(reasons(report))
    assert error(model, converted, {"x": normal(4, WIDTH)}) <= 0.02  # two steps of 255


def test_float_layers_before_and_behind_quantized_ones_are_float16() -> None:
    weights: dict[str, Any] = {"wide": normal(WIDTH, WIDTH, scale=0.2)}
    layer, a = quantized("t", 0, weights)
    model = parse(
        f"g (float[N, {WIDTH}] x) => (float[N, {WIDTH}] y) {{ m = MatMul (x, wide) t = Tanh (m) {layer} y = Relu ({a}) }}",
        **weights,
    )
    converted, report = halve(model)
    assert {"m", "t", "y"}.isdisjoint(reasons(report))
    assert error(model, converted, {"x": normal(4, WIDTH)}) <= 0.02


def test_a_branch_between_quantized_layers_is_float16() -> None:
    weights: dict[str, Any] = {}
    first, a = quantized("x", 0, weights)
    second, b = quantized("e", 1, weights)
    branch = f"""e = If (c) <then_branch = t () => (float[N, {WIDTH}] p) {{ p = Relu ({a}) }},
        else_branch = f () => (float[N, {WIDTH}] q) {{ q = Tanh ({a}) }}>"""
    model = parse(
        f"g (float[N, {WIDTH}] x, bool c) => (float[N, {WIDTH}] y) {{ {first} {branch} {second} y = Identity ({b}) }}",
        **weights,
    )
    converted, report = halve(model)
    assert REASON not in reasons(report).values()
    for chosen in (True, False):
        assert error(model, converted, {"x": normal(4, WIDTH), "c": np.array(chosen)}) <= 0.02


@pytest.mark.parametrize("opset", [12, 20])
def test_a_bias_that_joins_an_integer_product_is_exact(opset: int) -> None:
    """As older quantizers write it: the bias over both scales, rounded down, is added before the product is scaled."""
    model = parse(
        """g (float[1, 2, 6, 6] x) => (float[1, 3, 4, 4] y) {
        q, a, z = DynamicQuantizeLinear (x) s = Mul (a, ws) d = Div (bias, s) r = Floor (d) i = Cast <to = 6> (r)
        c = ConvInteger (q, w, z) j = Reshape (i, shape) t = Add (c, j) f = Cast <to = 1> (t) k = Mul (a, ws)
        u = Mul (f, k) y = Relu (u) }""",
        opset=opset,
        ws=np.float32(1e-4),
        bias=np.array([0.3, -0.7, 1.1], np.float32),
        w=np.random.default_rng(0).integers(0, 255, (3, 2, 3, 3)).astype(np.uint8),
        shape=np.array([1, 3, 1, 1]),
    )
    feeds = {"x": normal(1, 2, 6, 6)}
    converted = judged(model, feeds)
    kept = reasons(halve(model)[1])
    assert {"s", "d", "r"} <= set(kept)
    assert kept["r"] == ADDEND_REASON
    assert "y" not in kept
    assert error(model, converted, feeds) <= 1e-3
