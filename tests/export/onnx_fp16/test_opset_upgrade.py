"""Raising the opset so that more operators take bfloat16: the answers stay."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx_ir
import pytest

from halfserve.export.conversion_settings import ConversionSettings
from halfserve.export.export_errors import ExportError
from halfserve.export.onnx_fp16.opset_upgrade import upgrade_opset
from tests.export.onnx_fp16.models import normal, run
from tests.export.stored_models import parse

TO_BFLOAT16 = ConversionSettings(dtype="bfloat16")
X = normal(2, 4, 6, 6)
MODELS = {
    "reductions": "m = ReduceMax <axes = [2, 3]> (x) k = Conv (x, w) y = Sub (k, m)",
    "split": "a, b = Split <axis = 1> (x) c = Concat <axis = 1> (b, a) y = Conv (c, w)",
    "sampling": "k = Conv (x, w) y = GridSample <mode = 'bilinear'> (k, grid)".replace("'", '"'),
    "resizing": "k = Conv (x, w) y = Resize <mode = 'linear'> (k, , scales)".replace("'", '"'),
    "pools": "k = AveragePool <kernel_shape = [2, 2]> (x) y = MaxPool <kernel_shape = [2, 2]> (k)",
    "norms": "k = Conv (x, w) y = InstanceNormalization (k, s, s)",
    "body": """y = If (flag) <then_branch = t () => (float[a,b,c,d] p) { m = ReduceMax <axes = [1]> (x) p = Conv (x, w) },
        else_branch = e () => (float[a,b,c,d] q) { n = ReduceMax <axes = [1]> (x) z = Conv (x, w) q = Sub (z, n) }>""",
}


def model(name: str, opset: int) -> onnx.ModelProto:
    weights: dict[str, Any] = {
        "w": normal(4, 4, 1, 1),
        "grid": normal(2, 5, 5, 2) / 2,
        "s": np.ones(4),
        "scales": np.array([1.0, 1, 2, 2]),
    }
    text = f"g (float[2,4,6,6] x, bool flag) => (float[a,b,c,d] y) {{ {MODELS[name]} }}"
    return parse(text, opset=opset, ir=8, **{key: value for key, value in weights.items() if re.search(rf"\b{key}\b", text)})


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("opset", [16, 17])
def test_a_raised_model_gives_the_same_answers(name: str, opset: int) -> None:
    before = model(name, opset)
    work = onnx_ir.from_proto(before)
    (change,) = upgrade_opset(work, ConversionSettings(dtype="bfloat16", target_device="cpu"))
    after = onnx_ir.to_proto(work)
    onnx.checker.check_model(after, full_check=True)
    assert change.text == f"opset {opset} became 22"
    feeds = {"x": X, "flag": np.array(False)}
    np.testing.assert_allclose(run(after, **feeds)[0], run(before, **feeds)[0], rtol=0, atol=1e-6)


def test_it_is_not_raised_where_an_operator_loses_its_cuda_kernel() -> None:
    pools, convs, norms = (onnx_ir.from_proto(model(name, 17)) for name in ("pools", "split", "norms"))
    assert upgrade_opset(norms, TO_BFLOAT16) == upgrade_opset(pools, replace(TO_BFLOAT16, repair=False)) == ()
    for work in (convs, pools):  # a repair writes MaxPool by other operators
        assert upgrade_opset(work, TO_BFLOAT16)
        assert work.opset_imports[""] == 22


def test_it_is_raised_only_as_far_as_bfloat16_gains() -> None:
    text = "g (float[n,4] x, bool[n,4] c) => (float[n,4] y) { a = MatMul (x, w) b = Softmax (a) y = Where (c, a, b) }"
    work = onnx_ir.from_proto(parse(text, opset=14, ir=7, w=normal(4, 4)))
    upgrade_opset(work, TO_BFLOAT16)
    assert work.opset_imports[""] == 17, "16 has Where, and 17 LayerNormalization"


def test_a_model_that_gains_nothing_stays_as_it_is() -> None:
    work = onnx_ir.from_proto(parse("g (float[n,4] x) => (float[n,4] y) { y = Softmax (x) }", opset=18, ir=8))
    assert upgrade_opset(work, TO_BFLOAT16) == ()


def test_a_group_norm_of_one_scale_for_each_group_is_refused() -> None:
    text = "g (float[2,4,6,6] x) => (float[2,4,6,6] y) { k = Conv (x, w) y = GroupNormalization <num_groups = 2> (k, s, s) }"
    work = onnx_ir.from_proto(parse(text, opset=18, ir=8, w=normal(4, 4, 1, 1), s=np.ones(2)))
    with pytest.raises(ExportError, match="GroupNormalization 'y' has one scale for each group, from opset 21 on one for each"):
        upgrade_opset(work, TO_BFLOAT16)
