"""Whether the list of operators that stay with ONNX Runtime holds for this OpenVINO: ONNX's own node tests, in float32."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import parser

from benchmarks.half_device.openvino_model import OpenVinoModel
from halfserve.serve.backends.onnx_runtime.onnx_preparation import half_types
from halfserve.serve.backends.openvino.fitness import why_unfit
from halfserve.serve.engine.backend import CpuPrecision
from halfserve.serve.engine.errors import InvalidArgumentError, ModelLoadError
from tests.export.conversions.cases import Case, Value, cases
from tests.export.conversions.runtime import Session

LEAST_RIGHT = 700  # of the cases that are not left to ONNX Runtime


def fit_cases() -> list[Case]:
    """ONNX's node tests that OpenVINO may compute; in half precision other roundings are right too."""
    models = [(case, onnx.load_from_string(case.model)) for case in cases("node")]
    return [case for case, model in models if why_unfit(model) is None and not half_types(model)]


def differs(answer: Value, expected: Value) -> bool:
    answer, expected = np.asarray(answer), np.asarray(expected)
    if answer.shape != expected.shape:
        return True
    if answer.dtype.kind in "iub":
        return not np.array_equal(answer, expected)
    given, wanted = answer.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(wanted)
    if not np.array_equal(given[~finite], wanted[~finite], equal_nan=True) or not np.isfinite(given[finite]).all():
        return True
    scale = max(float(np.abs(wanted[finite]).max(initial=0)), 1e-3)
    return bool(np.abs(given[finite] - wanted[finite]).max(initial=0) > 2e-3 * scale)


@pytest.mark.parametrize("operator", ["ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMean"])
def test_reductions_over_axes_of_an_attribute_are_right_or_unfit(operator: str) -> None:
    text = f"g (float[N, 5] x) => (float[N] y) {{ y = {operator} <axes = [1], keepdims = 0> (x) }}"
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": 13]> {text}')
    x = np.random.default_rng(0).uniform(0.5, 2, (4, 5)).astype(np.float32)
    if why_unfit(model) is None:
        (answer,) = OpenVinoModel(model.SerializeToString(), CpuPrecision.FLOAT32).run({"x": x})
        (expected,) = Session(model.SerializeToString()).run({"x": x})
        assert not differs(answer, expected)


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_what_is_given_to_openvino_is_answered_as_onnx_defines_it() -> None:
    wrong, right = [], 0
    for case in fit_cases():
        try:
            model = OpenVinoModel(case.model, CpuPrecision.FLOAT32, threads=2)
        except ModelLoadError:
            continue  # ONNX Runtime takes it
        try:
            answers = model.run(case.inputs[0])
        except InvalidArgumentError:  # sizes or integers that are refused
            continue
        assert case.expected is not None
        if any(map(differs, answers, case.expected[0])):
            wrong.append(case.name)
        else:
            right += 1
    assert wrong == []
    assert right >= LEAST_RIGHT
