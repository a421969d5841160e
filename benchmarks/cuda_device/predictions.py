"""What the simulation says of an fp16 model's error on the CPU, and the error that a device makes, over ONNX's own tests."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime as ort

from benchmarks.converters.cases import Case, Value
from benchmarks.converters.crash_pool import Crash, CrashPool
from benchmarks.converters.runtime import Session
from benchmarks.converters.suite import judgeable_cases
from halfserve import convert_float_to_float16
from halfserve.export.verification.simulation import round_every_node

ONE_ROUNDING = 2.0**-11  # of a number of magnitude 1, to float16
TIMEOUT_S = 120.0
CUDA = "CUDAExecutionProvider"


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Of one model, as parts of the reference's largest magnitude; infinite where one side alone is finite.

    Attributes:
        predicted: by the simulation.
        found: on the device.
    """

    predicted: float
    found: float

    @property
    def ratio(self) -> float:
        """Of the found error to the predicted one, which is one rounding at least."""
        if math.isinf(self.predicted):
            return float(math.isinf(self.found))
        return self.found / max(self.predicted, ONE_ROUNDING)


def errors_of(kind: str, provider: str) -> Iterator[tuple[str, Errors | Crash]]:
    """Each of ONNX's test models of a kind that hold float32: its name, and its errors.

    Args:
        kind: of `benchmarks.converters.cases.KINDS`.
        provider: of ONNX Runtime, whose errors they are.
    """
    workers = max(2, (os.cpu_count() or 2) // 2)
    cases = judgeable_cases(kind, workers)
    with CrashPool(compared, workers=workers, timeout_seconds=TIMEOUT_S) as pool:
        yield from zip((case.name for case in cases), pool.map((case, provider) for case in cases), strict=True)


def compared(case: Case, provider: str) -> Errors:
    """Convert a model, and compare what it answers with what it answered before."""
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
        predicted = max(predicted, *map(_error, wanted, simulated.run(inputs)))
        found = max(found, *map(_error, wanted, device.run(inputs)))
    return Errors(predicted=predicted, found=found)


def _error(wanted: Value, answer: Value) -> float:
    if isinstance(wanted, list) and isinstance(answer, list):
        return max(map(_error, wanted, answer), default=0.0)
    if not isinstance(wanted, np.ndarray) or not np.issubdtype(wanted.dtype, np.floating):
        return 0.0
    exact, half = wanted.astype(np.float64), np.asarray(answer).astype(np.float64)
    finite = np.isfinite(exact)
    if exact.shape != half.shape or not np.array_equal(finite, np.isfinite(half)):
        return float("inf")
    if not finite.any():
        return 0.0
    return float(np.abs(half[finite] - exact[finite]).max() / max(np.abs(exact[finite]).max(), 2.0**-14))
