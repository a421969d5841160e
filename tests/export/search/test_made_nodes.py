"""A search in a model that a repair puts nodes into, which it does not do where their neighbours stay float32."""

from __future__ import annotations

import onnx
import onnx_ir
import pytest

from export.certificate.budget import Budget
from export.onnx_fp16.convert import convert
from export.onnx_fp16.settings import Settings
from export.search.searched_model import searched_model
from export.search.smallest_fp32_set import find_fp32_nodes
from tests.export.onnx_fp16.models import normal, parse

X = normal(8, 16)


@pytest.fixture
def gelu() -> onnx.ModelProto:
    """The tanh-GELU of a product: a Clip goes before the cube, unless that stays float32."""
    return parse(
        """g (float[N, 16] x) => (float[N, 8] y) {
        mm = MatMul (x, w) cube = Pow (mm, three) small = Mul (cube, k) sum = Add (mm, small) inner = Mul (sum, s)
        tanh = Tanh (inner) more = Add (tanh, one) product = Mul (mm, more) y = Mul (product, half) }""",
        w=normal(16, 8),
        three=3.0,
        k=0.044715,
        s=0.7978845,
        one=1.0,
        half=0.5,
    )


@pytest.mark.parametrize("error", [1e-4, 1e-6, 1e-9])
def test_what_is_found_can_be_converted(gelu: onnx.ModelProto, error: float) -> None:
    found = find_fp32_nodes(gelu, [X], budget=Budget(max_scaled_error=error), adversarial=False)
    assert found.passed
    done = convert(onnx_ir.from_proto(gelu), node_block_list=found.node_block_list)
    assert set(found.node_block_list) <= {kept.name for kept in done.report.kept}


def test_nodes_that_no_repair_makes_any_more_are_not_present(gelu: onnx.ModelProto) -> None:
    searched = searched_model(gelu, Settings())
    assert searched.made == {"cube/Clip"}
    assert searched.present(["mm", "cube/Clip"]) == ["cube/Clip", "mm"]
    assert searched.present(["cube", "cube/Clip"]) == ["cube"]
