"""A mask that every layer of a transformer reads."""

from __future__ import annotations

import numpy as np
import pytest

from export.onnx_fp16.repair.soften_masks import SoftenMasks
from tests.export.onnx_fp16.models import parse
from tests.export.onnx_fp16.repair.same import operators, same


@pytest.mark.parametrize("layers", [2, 3, 5])
def test_each_softmax_that_shares_a_mask_is_repaired(layers: int) -> None:
    body = " ".join(f"s{i} = Add (x{i}, p) x{i + 1} = Softmax <axis = -1> (s{i})" for i in range(layers))
    model = parse(
        f"""g (float[3, 8] x, float[3, 8] mask) => (float[3, 8] y) {{
        x0 = Identity (x) h = Sub (one, mask) p = Mul (h, lowest) {body} y = Identity (x{layers}) }}""",
        one=np.array(1.0), lowest=np.array(-1e9),
    )  # fmt: skip
    mask = np.array([[1] * 8, [1, 0] * 4, [0] * 8], np.float32)
    x = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    after = same(model, SoftenMasks(), {"x": x, "mask": mask})
    assert operators(after).count("Where") == layers
    assert {name for node in after.graph.node for name in node.input} >= {tensor.name for tensor in after.graph.initializer}
