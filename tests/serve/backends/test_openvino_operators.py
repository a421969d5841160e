"""Whether the list of operators that stay with ONNX Runtime holds for this OpenVINO: ONNX's own node tests, in float32."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, numpy_helper
from onnx.backend.test.loader import load_model_tests

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.backends.onnx_runtime.onnx_interface import read_interface
from halfserve.serve.backends.onnx_runtime.upcast import half_types
from halfserve.serve.backends.openvino.onnx_fitness import why_unfit
from halfserve.serve.backends.openvino.runtime import OpenVinoRuntime
from halfserve.serve.engine.backend import CpuPrecision, DevicePlacement
from halfserve.serve.engine.errors import InvalidArgumentError, ModelLoadError
from halfserve.serve.engine.tensors import Array

ON_CPU = DevicePlacement(use_gpu=False, threads=2)
LEAST_RIGHT = 700  # of the cases that are not left to ONNX Runtime


def cases() -> list[Any]:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        found = [(case, case.model) for case in load_model_tests(kind="node")]
        # In half precision other roundings are right too.
        return [case for case, model in found if model is not None and why_unfit(model) is None and not half_types(model)]


def as_array(value: Any) -> Array:
    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.asarray(value)


def differs(answer: Array, expected: Array) -> bool:
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


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_what_is_given_to_openvino_is_answered_as_onnx_defines_it(tmp_path: Path) -> None:
    runtime, wrong, right = OpenVinoRuntime(), [], 0
    for case in cases():
        path = tmp_path / "model.onnx"
        path.write_bytes(case.model.SerializeToString())
        try:
            interface = read_interface(path)
            backend = runtime.load_onnx(path, interface, ON_CPU, ModelConfig(), CpuPrecision.FLOAT32)
        except ModelLoadError:
            continue  # ONNX Runtime takes it
        given, expected = case.data_sets[0]
        named = zip(interface.inputs, map(as_array, given), strict=False)
        inputs = {spec.name: np.asarray(array, backend.compute_dtype(spec.name)) for spec, array in named}
        try:
            answers = backend.run(inputs)
        except InvalidArgumentError:  # sizes or integers that are refused
            continue
        if any(differs(answers[s.name], as_array(w)) for s, w in zip(interface.outputs, expected, strict=False)):
            wrong.append(case.name)
        else:
            right += 1
    assert wrong == []
    assert right >= LEAST_RIGHT
