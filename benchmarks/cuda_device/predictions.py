"""An fp16 model's error in the simulation on the CPU, and its error on a device, over ONNX's own tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import onnx
import onnxruntime as ort

from benchmarks.converters.prediction import Errors, error_of
from benchmarks.converters.suite import judgeable_cases
from halfserve import convert_float_to_float16
from halfserve.export.verification.simulation import round_every_node
from tests.export.conversions.cases import Case
from tests.export.conversions.crash_pool import Crash, CrashPool
from tests.export.conversions.runtime import Session

TIMEOUT_S = 120.0
CUDA = "CUDAExecutionProvider"


def errors_of(kind: str, provider: str) -> Iterator[tuple[str, Errors | Crash]]:
    """Name and errors of each of ONNX's test models of a kind that have float32 values.

    Args:
        kind: one of `tests.export.conversions.cases.KINDS`.
        provider: ONNX Runtime's execution provider, whose errors are measured.
    """
    workers = max(2, (os.cpu_count() or 2) // 2)
    cases = judgeable_cases(kind, workers)
    with CrashPool(compared, workers=workers, timeout_seconds=TIMEOUT_S) as pool:
        yield from zip((case.name for case in cases), pool.map((case, provider) for case in cases), strict=True)


def compared(case: Case, provider: str) -> Errors:
    """Convert a model, and compare its answers with those before the conversion."""
    model = onnx.load_from_string(case.model)
    converted = convert_float_to_float16(model, keep_io_types=True)
    reference = Session(case.model)
    simulated = Session(round_every_node(converted).SerializeToString(), "ORT_DISABLE_ALL")
    if provider == CUDA:
        ort.preload_dlls()
    device = Session(converted.SerializeToString(), provider=provider)
    predicted = found = 0.0
    for inputs in case.inputs:
        wanted = reference.run(inputs)
        predicted = max(predicted, *map(error_of, wanted, simulated.run(inputs)))
        found = max(found, *map(error_of, wanted, device.run(inputs)))
    return Errors(predicted=predicted, found=found)
