from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest

from halfserve.export.half_types import FP16
from halfserve.export.onnx_fp16.planning import decisions as rules
from halfserve.export.onnx_fp16.planning.exact_arithmetic import addend_reason
from halfserve.export.onnx_fp16.planning.quantization import BIAS_REASON, CONCAT_REASON, between_reason
from halfserve.export.verification.metrics import compare
from halfserve.export.verification.simulation import round_every_node
from tests.export.conversions.runtime import Session
from tests.export.onnx_fp16.models import assert_clean_both_ways, halve, judged, normal, reasons
from tests.export.stored_models import parse

LEVELS = ["ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL"]
STEP = 0.02


def quantized(name: str, source: str = "", scale: str = "s") -> str:
    return f"q{name} = QuantizeLinear ({source or name}, {scale}, zero) d{name} = DequantizeLinear (q{name}, {scale}, zero) "


def model(body: str, result: str, *, opset: int = 21, **weights: Any) -> onnx.ModelProto:
    scales = {"s": np.float32(0.01), "step": np.float32(STEP), "zero": np.uint8(128)}
    graph = f"g (float[2, 4, 8, 8] x, float[2, 4, 8, 8] z) => (float[a, b, c, d] y) {{ {body} y = Identity ({result}) }}"
    return parse(graph, opset=opset, **(scales | weights))


def steps_away(source: onnx.ModelProto, converted: onnx.ModelProto, level: str) -> float:
    feeds = {"x": normal(2, 4, 8, 8), "z": normal(2, 4, 8, 8)}
    before = Session(source.SerializeToString(), "ORT_DISABLE_ALL").run(feeds)[0]
    after = Session(converted.SerializeToString(), level).run(feeds)[0]
    return float(np.abs(after.astype(np.float64) - before).max()) / STEP


BOTH = quantized("x") + quantized("z")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "joined",
    [
        "c = Concat <axis = 1> (dx, dz)",
        "t = Transpose <perm = [0, 1, 3, 2]> (dx) c = Concat <axis = 1> (t, dz)",
        "t = MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (dx) c = Concat <axis = 1> (t, dz)",
        "t = Concat <axis = 1> (dx, dz) c = Transpose <perm = [0, 1, 3, 2]> (t)",
    ],
)
def test_a_concat_of_quantized_tensors_opens_and_is_right(joined: str, level: str) -> None:
    source = model(BOTH + joined + quantized("c", scale="step"), "dc")
    converted, report = halve(source)
    assert set(reasons(report).values()) == {CONCAT_REASON}
    assert steps_away(source, converted, level) < 1.5


@pytest.mark.parametrize(
    "joined",
    [
        "r = Relu (dx) c = Concat <axis = 1> (r, dz)",
        "c = Concat <axis = 1> (dx, z)",
        "e = Concat <axis = 1> (dx, dz) c = Relu (e)",
    ],
)
def test_another_concat_is_float16(joined: str) -> None:
    source = model(BOTH + joined + quantized("c", scale="step"), "dc")
    converted, report = halve(source)
    assert reasons(report) == {}
    assert steps_away(source, converted, "ORT_ENABLE_ALL") < 1.5


def test_a_concat_whose_result_is_read_as_it_is_is_float16() -> None:
    body = BOTH + "c = Concat <axis = 1> (dx, dz) " + quantized("c", scale="step") + "e = Abs (c) f = Add (e, dc)"
    assert reasons(halve(model(body, "f"))[1]) == {}


def layer(scale: float, *, op: str = "Conv", bias: float = 1.0, end: str = "Relu") -> onnx.ModelProto:
    weights: dict[str, Any] = {
        "w": np.random.default_rng(0).integers(-127, 127, (4, 4, 3, 3)).astype(np.int8),
        "s": np.float32(scale),
        "ws": np.full(4 if op == "Conv" else (), scale, np.float32),
        "b": bias * normal(4),
    }
    body = f"dw = DequantizeLinear <axis = 0> (w, ws) p = {op} (dx, dw, b) e = {end} (p) "
    return model(quantized("x") + body + quantized("e", scale="step"), "de", **weights)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("op", ["Conv", "ConvTranspose"])
@pytest.mark.parametrize("scale", [1e-4, 1e-3, 4e-3])
def test_the_bias_of_a_layer_between_quantized_tensors_keeps_its_value(scale: float, op: str, level: str) -> None:
    source = layer(scale, op=op)
    converted, report = halve(source)
    assert reasons(report) == {"dw": BIAS_REASON}
    assert steps_away(source, converted, level) < 1.5


def test_a_large_bias_is_no_quotient_for_float16() -> None:
    assert reasons(halve(layer(0.01))[1]) == {}
    assert reasons(halve(layer(0.01, bias=50.0))[1]) == {"dw": BIAS_REASON}


def test_a_layer_whose_bias_the_runtime_leaves_alone_is_float16() -> None:
    assert reasons(halve(layer(1e-3, end="Sigmoid"))[1]) == {}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("scale", [3e-8, 2e-6])
def test_a_scale_that_loses_its_digits_stays_float32(scale: float, level: str) -> None:
    whole = np.array([1.0, -0.5, 2.0, 0.25]) / scale
    body = quantized("x") + "db = DequantizeLinear (b, sb) v = Reshape (db, shape) e = Add (dx, v)"
    weights: dict[str, Any] = {"b": whole.astype(np.int32), "sb": np.float32(scale), "shape": np.array([1, 4, 1, 1])}
    source = model(body, "e", **weights)
    converted, report = halve(source)
    assert reasons(report) == {"db": f"its scale of {scale:.3g} keeps few digits in float16"}
    assert steps_away(source, converted, level) < 0.8  # one of the input's own


def test_a_channel_that_is_dead_has_no_scale_to_lose() -> None:
    body = quantized("x") + "db = DequantizeLinear <axis = 1> (b, sb) e = Add (dx, db)"
    assert (
        reasons(halve(model(body, "e", b=np.ones((1, 4, 1, 1), np.int8), sb=np.array([0.1, 0, 0.2, 0.3], np.float32)))[1]) == {}
    )


@pytest.mark.parametrize("level", LEVELS)
def test_scales_that_are_no_constants_may_be_small(level: str) -> None:
    source = layer(1e-3)
    (place,) = (index for index, tensor in enumerate(source.graph.initializer) if tensor.name == "s")
    scale = onnx.numpy_helper.to_array(source.graph.initializer[place])
    del source.graph.initializer[place]
    halved = onnx.helper.make_node("Mul", ["hs", "two"], ["s"], name="s")
    source.graph.node.insert(0, halved)
    for name, value in (("hs", scale / 2), ("two", np.float32(2))):
        source.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value, np.float32), name))
    converted, report = halve(source)
    assert reasons(report)["dw"] == BIAS_REASON
    assert steps_away(source, converted, level) < 1.5


WIDTH = 32
LAYERS = 16


def dynamic_layer(source: str, number: int, weights: dict[str, Any]) -> tuple[str, str]:
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
        layer, value = dynamic_layer(value, number, weights)
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
    assert_clean_both_ways(model, feeds)
    converted, report = halve(model)
    kept = reasons(report)
    assert {name for name, reason in kept.items() if reason == between_reason(FP16)} == {
        f"{v}{n}" for v in "gx" for n in range(LAYERS - 1)
    }
    assert {"b", "y"}.isdisjoint(kept)
    assert error(model, converted, feeds) <= 1e-3
    monkeypatch.setattr(rules, "nodes_between", lambda _: [])
    assert error(model, halve(model)[0], feeds) > 0.01


def test_a_layer_with_float_weights_between_quantized_ones_is_float16() -> None:
    weights: dict[str, Any] = {"wide": normal(WIDTH, WIDTH, scale=0.2)}
    first, a = dynamic_layer("x", 0, weights)
    second, b = dynamic_layer("t", 1, weights)
    middle = f"r = Relu ({a}) m = MatMul (r, wide) t = Tanh (m)"
    model = parse(f"g (float[N, {WIDTH}] x) => (float[N, {WIDTH}] y) {{ {first} {middle} {second} y = Neg ({b}) }}", **weights)
    converted, report = halve(model)
    assert {"r", "m", "t", "y"}.isdisjoint(reasons(report))
    assert error(model, converted, {"x": normal(4, WIDTH)}) <= 0.02  # two steps of 255


def test_float_layers_before_and_behind_quantized_ones_are_float16() -> None:
    weights: dict[str, Any] = {"wide": normal(WIDTH, WIDTH, scale=0.2)}
    layer, a = dynamic_layer("t", 0, weights)
    model = parse(
        f"g (float[N, {WIDTH}] x) => (float[N, {WIDTH}] y) {{ m = MatMul (x, wide) t = Tanh (m) {layer} y = Relu ({a}) }}",
        **weights,
    )
    converted, report = halve(model)
    assert {"m", "t", "y"}.isdisjoint(reasons(report))
    assert error(model, converted, {"x": normal(4, WIDTH)}) <= 0.02


def test_a_branch_between_quantized_layers_is_float16() -> None:
    weights: dict[str, Any] = {}
    first, a = dynamic_layer("x", 0, weights)
    second, b = dynamic_layer("e", 1, weights)
    branch = f"""e = If (c) <then_branch = t () => (float[N, {WIDTH}] p) {{ p = Relu ({a}) }},
        else_branch = f () => (float[N, {WIDTH}] q) {{ q = Tanh ({a}) }}>"""
    model = parse(
        f"g (float[N, {WIDTH}] x, bool c) => (float[N, {WIDTH}] y) {{ {first} {branch} {second} y = Identity ({b}) }}",
        **weights,
    )
    converted, report = halve(model)
    assert between_reason(FP16) not in reasons(report).values()
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
    assert kept["r"] == addend_reason(FP16)
    assert "y" not in kept
    assert error(model, converted, feeds) <= 1e-3
