"""One model converted to half precision: the simulation's predicted error, and the actual error on this processor."""

from __future__ import annotations

from dataclasses import dataclass

import onnx

from benchmarks.converters.prediction import Errors, errors_of
from benchmarks.half_device.openvino_model import OpenVinoModel
from halfserve import convert_float_to_float16
from halfserve.export.export_errors import ExportError
from halfserve.export.half_types import HALF_TYPES, HalfName
from halfserve.serve.backends.openvino.fitness import why_unfit
from halfserve.serve.engine.backend import CpuPrecision
from halfserve.serve.engine.errors import InferenceError, InstanceLostError, ModelLoadError
from tests.export.conversions.cases import Case


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Result of one model in one precision."""

    errors: Errors | None = None  # the errors; None if OpenVINO did not compute the model
    reason: str = ""  # the reason why it was not computed; "" if it was
    half_layers: int = 0  # number of layers that computed in the half precision


def compared(case: Case, half: HalfName) -> Comparison:
    """Convert a model without a search, and compare the answers of the simulation and of OpenVINO with float32's."""
    original = onnx.load_from_string(case.model)
    try:
        converted = convert_float_to_float16(original, dtype=half, keep_io_types=True, upgrade_opset=True, target_device="cpu")
    except ExportError as error:
        return Comparison(reason=f"the converter refuses it: {str(error).splitlines()[0]}")
    if (unfit := why_unfit(converted)) is not None:
        return Comparison(reason=unfit)
    try:
        device = OpenVinoModel(converted.SerializeToString(), CpuPrecision(half))
        errors = errors_of(case, converted, device, HALF_TYPES[half])
    except (ModelLoadError, InferenceError, InstanceLostError) as error:
        return Comparison(reason=str(error).rpartition("model.onnx: ")[2].splitlines()[0])
    return Comparison(errors=errors, half_layers=device.precisions.count(HALF_TYPES[half].short))
