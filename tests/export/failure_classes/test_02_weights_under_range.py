"""Class 2: weights that float16 flushes to zero or holds with fewer bits."""

from __future__ import annotations

import numpy as np
import onnx_ir

from export.onnx_fp16.convert import convert
from tests.export.failure_classes.converters import Converter, both, normal, parse


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
        tensor.ledger for tensor in convert(onnx_ir.from_proto(model), repair=False).report.weights if tensor.name == "w"
    ]
    assert [(one.overflow, one.flushed, one.subnormal) for one in ledgers] == [(0, 2, 1)]
