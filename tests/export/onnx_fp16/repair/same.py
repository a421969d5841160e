"""A repair changes no answer: the model before and after it, run side by side in float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir

from halfserve.export.conversion_settings import ConversionSettings
from halfserve.export.onnx_fp16.conversion_report import Repair
from halfserve.export.onnx_fp16.prepare import prepare
from halfserve.export.onnx_fp16.repair import run_passes
from halfserve.export.onnx_fp16.repair.edits import RepairPass
from tests.export.conversions.runtime import Session

Array = np.ndarray[Any, Any]


def repaired(model: onnx.ModelProto, repair: RepairPass) -> tuple[onnx.ModelProto, tuple[Repair, ...]]:
    """The model after one repair, checked, and what the repair says; a second run must find nothing left."""
    work = onnx_ir.from_proto(onnx.ModelProto.FromString(model.SerializeToString()))
    prepare(work, ConversionSettings())
    repairs = run_passes(work, [repair])
    assert run_passes(work, [repair]) == (), "not idempotent"
    result = onnx_ir.to_proto(work)
    onnx.checker.check_model(result, full_check=True)
    return result, repairs


def answers(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> list[Array]:
    """What ONNX Runtime makes of it, node by node."""
    return [np.asarray(answer) for answer in Session(model.SerializeToString(), "ORT_DISABLE_ALL").run(dict(feeds))]


def same(model: onnx.ModelProto, repair: RepairPass, feeds: Mapping[str, Array], rtol: float = 1e-5) -> onnx.ModelProto:
    """The repaired model, after it gave the same answers as before, within `rtol` of the largest of them."""
    after, repairs = repaired(model, repair)
    assert repairs, "the repair did not see it"
    compare(model, after, feeds, rtol)
    return after


def assert_untouched(model: onnx.ModelProto, repair: RepairPass) -> None:
    """The repair finds nothing to do."""
    assert repaired(model, repair)[1] == ()


def compare(before: onnx.ModelProto, after: onnx.ModelProto, feeds: Mapping[str, Array], rtol: float = 1e-5) -> None:
    """Fail where two models differ by more than `rtol` of the output's largest value."""
    for old, new in zip(answers(before, feeds), answers(after, feeds), strict=True):
        assert old.shape == new.shape
        np.testing.assert_allclose(new, old, rtol=0, atol=rtol * max(float(np.abs(old).max(initial=0)), 1e-30))


def operators(model: onnx.ModelProto) -> list[str]:
    """The operators of the main graph, in order."""
    return [node.op_type for node in model.graph.node if node.op_type != "Constant"]
