"""A float16 model with a float32 island, and operators that a GPU has no kernels for."""

from __future__ import annotations

import numpy as np
import onnx

from tests.export.stored_models import parse


def half_model() -> onnx.ModelProto:
    """x [2, 8] float16 -> MatMul, Tan, (Exp, Sqrt in float32), Reshape, GridSample -> y."""
    text = """half (float16[2, 8] x, float16[1, 1, 4, 4] image) => (float16[1, 1, 4, 2] y) {
        [matmul] a = MatMul (x, w) [tan] b = Tan (a)
        [up] c = Cast <to = 1> (b) [exp] d = Exp (c) [sqrt] e = Sqrt (d) [down] f = Cast <to = 10> (e)
        [reshape] g = Reshape (f, grid) [grid_sample] y = GridSample (image, g) }"""
    return parse(text, ir=10, w=np.ones((8, 8), np.float16), grid=np.array([1, 4, 2, 2]))


def one_node(op_type: str, opset: int, dtype: str = "float16", domain: str = "") -> onnx.ModelProto:
    """y = op(x), x of the given type and any shape."""
    operator, imports = (f"{domain}.{op_type}", f', "{domain}": 1') if domain else (op_type, "")
    return parse(f"one ({dtype}[n] x) => ({dtype}[n] y) {{ y = {operator} (x) }}", opset=opset, ir=10, imports=imports)
