from __future__ import annotations

import numpy as np
import pytest
from onnx import numpy_helper, parser

from halfserve.files.cuda_products import product_options

IN_A_BODY = """y = If (f) <
    then_branch = t () => (float16[n,1,2,2] a) {{ a = {op} (c, h) }},
    else_branch = e () => (float16[n,1,2,2] b) {{ b = Relu (c) }}
>"""
FUNCTION = """<domain: "own", opset_import: ["": 17]> layer (x, w) => (y) { y = Conv (x, w) }"""
HALF, FULL = "c = Cast <to = 10> (x)", "c = Cast <to = 1> (x)"


@pytest.mark.parametrize(
    ("body", "has_tf32"),
    [
        ("y = Conv (x, w)", False),
        (f"{FULL}  y = Conv (c, w)", False),
        (f"{HALF}  y = Conv (c, h)", True),
        (f"{HALF}  r = Relu (c)  s = Mul (r, r)  y = ConvTranspose (s, h)", True),
        (f"{HALF}  k = MatMul (c, c)  y = Conv (x, w)", False),
        (f"{HALF}  m = MatMul (c, c)  y = Cast <to = 1> (m)", False),
        ("c = Cast <to = 16> (x)  v = Cast <to = 16> (w)  y = Conv (c, v)", True),
        (f"{HALF}  {IN_A_BODY.format(op='Conv')}", True),
        (f"{HALF}  {IN_A_BODY.format(op='MatMul')}", False),
        (f"{HALF}  y = own.layer (c, h)", True),
        ("y = own.layer (x, w)", False),
    ],
)
def test_a_file_with_a_half_precision_convolution_keeps_tf32(body: str, has_tf32: bool) -> None:
    text = f"""<ir_version: 9, opset_import: ["": 17, "own": 1]>
    g (float[n,1,2,2] x, bool f) => (float[n,1,2,2] y) {{ {body} }}"""
    model = parser.parse_model(f"{text}\n{FUNCTION}" if "own." in body else text)
    weights = {"w": np.float32, "h": np.float16}
    for name, dtype in weights.items():
        if f"{name})" in body:
            model.graph.initializer.append(numpy_helper.from_array(np.ones((1, 1, 1, 1), dtype), name))
    assert product_options(model) == ({} if has_tf32 else {"use_tf32": "0"})
