from __future__ import annotations

import numpy as np
import onnx_ir
import pytest

from halfserve.export.conversion_settings import ConversionSettings
from halfserve.export.onnx_fp16.convert import convert
from tests.export.failure_classes.converters import Converter, both, normal, parse

# Class 1: BatchNorm statistics and weights over 65504, which others clamp without a word.

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


# Class 2: weights that float16 flushes to zero or holds with fewer bits.


@both
def test_a_matrix_that_vanishes(converter: Converter) -> None:
    model = parse("g (float[N, 8] x) => (float[N, 8] y) { s = MatMul (x, w) y = Mul (s, large) }",
        w=normal(8, 8, scale=1e-9), large=np.float32(2.0**14))  # fmt: skip
    model.graph.node.add(op_type="Mul", input=["y", "large"], output=["z"])
    model.graph.output[0].name = "z"
    converter.try_on(model, {"x": normal(5, 8)})


@both
def test_a_kernel_of_subnormal_numbers(converter: Converter) -> None:
    model = parse("g (float[1, 3, 6, 6] x) => (float[1, 4, 4, 4] y) { s = Conv (x, w) y = Mul (s, large) }",
        w=normal(4, 3, 3, 3, scale=2e-7), large=np.float32(3e4))  # fmt: skip
    converter.try_on(model, {"x": normal(1, 3, 6, 6)})


def test_the_report_counts_what_became_of_the_weights() -> None:
    weights = np.array([1.0, 1e-9, -2e-8, 1e-6, 6e4, 0.0], np.float32)
    model = parse("g (float[N, 6] x) => (float[N, 6] y) { y = Mul (x, w) }", w=weights)
    ledgers = [
        tensor.ledger
        for tensor in convert(onnx_ir.from_proto(model), ConversionSettings(repair=False)).report.weights
        if tensor.name == "w"
    ]
    assert [(one.overflow, one.flushed, one.subnormal) for one in ledgers] == [(0, 2, 1)]


# Class 13: scattering with a reduction, for which ONNX Runtime's CPU has no float16 and puts no casts in.


@both
@pytest.mark.parametrize("reduction", ["add", "mul", "max", "min"])
def test_scatter_nd(reduction: str, converter: Converter) -> None:
    model = parse(f"""g (float[4, 3] x, float[2, 3] u) => (float[4, 3] y) {{
        r = Relu (x)
        s = ScatterND <reduction = "{reduction}"> (r, at, u)
        y = Neg (s) }}""", 18, at=np.array([[1], [1]], np.int64))  # fmt: skip
    converter.try_on(model, {"x": normal(4, 3), "u": normal(2, 3, seed=1)})


@both
@pytest.mark.parametrize("reduction", ["add", "mul"])
def test_scatter_elements(reduction: str, converter: Converter) -> None:
    model = parse(f"""g (float[4, 3] x, float[2, 3] u) => (float[4, 3] y) {{
        r = Relu (x)
        s = ScatterElements <axis = 0, reduction = "{reduction}"> (r, at, u)
        y = Neg (s) }}""", 18, at=np.array([[1, 2, 3], [1, 2, 3]], np.int64))  # fmt: skip
    converter.try_on(model, {"x": normal(4, 3), "u": normal(2, 3, seed=1)})
