"""One model converted to half precision: the simulation's predicted error, and the actual error on this processor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from benchmarks.converters.prediction import Errors, error_of
from benchmarks.half_device.openvino_model import Layer, OpenVinoModel
from halfserve import convert_float_to_float16
from halfserve.export.export_errors import ExportError
from halfserve.export.half_types import HALF_TYPES, HalfName
from halfserve.export.verification.simulation import round_every_node
from halfserve.serve.backends.openvino.fitness import why_unfit
from halfserve.serve.engine.backend import CpuPrecision
from halfserve.serve.engine.errors import InferenceError, InstanceLostError, ModelLoadError
from tests.export.conversions.cases import Case, Value
from tests.export.conversions.runtime import Session

# Kinds of OpenVINO's layers that add many numbers, in an order of their own.
SUMMING = frozenset(
    {
        *("Convolution", "Deconvolution", "FullyConnected", "GroupNormalization", "LSTMCell", "LSTMSequence", "MatMul", "MVN"),
        *("NormalizeL2", "Pooling", "Reduce", "RMS", "RNNCell", "RNNSeq", "ScaledDotProductAttention", "Softmax"),
    }
)
NAMED = 4  # most layers that a cause names


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Result of one model in one precision.

    Attributes:
        errors: The errors; None if OpenVINO did not compute the model.
        reason: The reason why it was not computed; "" if it was.
        half_layers: Number of layers that computed in the half precision.
        cause: If the processor's error is larger than predicted, the difference in OpenVINO's computation; else "".
    """

    errors: Errors | None = None
    reason: str = ""
    half_layers: int = 0
    cause: str = ""


def compared(case: Case, half: HalfName) -> Comparison:
    """Convert a model without a search, and compare the answers of the simulation and of OpenVINO with float32's."""
    original = onnx.load_from_string(case.model)
    try:
        converted = convert_float_to_float16(original, dtype=half, keep_io_types=True, upgrade_opset=True)
    except ExportError as error:
        return Comparison(reason=f"the converter refuses it: {str(error).splitlines()[0]}")
    if (unfit := why_unfit(converted)) is not None:
        return Comparison(reason=unfit)
    wanted = _answers(Session(case.model), case)
    simulation = round_every_node(converted, HALF_TYPES[half]).SerializeToString()
    predicted = _error(wanted, _answers(Session(simulation, "ORT_DISABLE_ALL"), case), half)
    try:
        device = OpenVinoModel(converted.SerializeToString(), CpuPrecision(half))
        found = _error(wanted, _answers(device, case), half)
    except (ModelLoadError, InferenceError, InstanceLostError) as error:
        return Comparison(reason=str(error).rpartition("model.onnx: ")[2].splitlines()[0])
    errors = Errors(predicted=predicted, found=found, rounding=2.0 ** -HALF_TYPES[half].significant_bits)
    layers, short = device.layers, HALF_TYPES[half].short
    return Comparison(
        errors=errors,
        half_layers=sum(layer.precision == short for layer in layers),
        cause=_cause(case, converted, layers, wanted, errors) if errors.ratio > 1 else "",
    )


def _answers(session: Session | OpenVinoModel, case: Case) -> list[list[Value]]:
    with np.errstate(over="ignore"):  # inputs beyond the half type's range
        return [session.run(inputs) for inputs in case.inputs]


def _error(wanted: list[list[Value]], answers: list[list[Value]], half: HalfName) -> float:
    pairs = zip(wanted, answers, strict=True)
    return max(
        error_of(one, other, HALF_TYPES[half]) for right, given in pairs for one, other in zip(right, given, strict=True)
    )


def _cause(case: Case, converted: onnx.ModelProto, layers: Sequence[Layer], wanted: list[list[Value]], errors: Errors) -> str:
    in_float32 = _error(wanted, _answers(OpenVinoModel(case.model, CpuPrecision.FLOAT32), case), "float16")
    if in_float32 > errors.found / 2:
        return f"OpenVINO is off by {in_float32:.2g} in float32 too"
    named = set(_names(converted.graph))
    parts = [layer for layer in layers if any(_without_suffix(step) not in named for step in layer.steps)]
    fused = [layer for layer in layers if len(layer.steps) > 1]
    sums = [layer for layer in layers if layer.kind in SUMMING]
    what, chosen = next(
        ((what, chosen) for what, chosen in (("computed in steps", parts), ("fused", fused), ("sums", sums)) if chosen),
        ("other kernels", list(layers)),
    )
    listed = [
        f"{'+'.join(step.rstrip('0123456789_') for step in layer.steps) or layer.kind} in {layer.precision}" for layer in chosen
    ]
    return f"{what}: {', '.join(listed[:NAMED])}{', ...' if len(listed) > NAMED else ''}"


def _without_suffix(step: str) -> str:
    """OpenVINO names the parts of a node "node/part"."""
    return step.partition("/")[0]


def _names(graph: onnx.GraphProto) -> Iterator[str]:
    for node in graph.node:
        yield _without_suffix(node.name)
        yield from map(_without_suffix, node.output)
        for attribute in node.attribute:
            yield from _names(attribute.g)
