"""ONNX Runtime, for models whose inputs and outputs may be arrays, sequences and optionals."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime

from halfserve.export.half_types import FP16, HalfType
from tests.export.conversions.cases import Value

_FLOATS = {"float": np.float32, "float16": np.float16, "double": np.float64}


class Session:
    """A model, opened with all of the runtime's optimisations, on the CPU unless another provider is named.

    Raises:
        Exception: Any exception with which ONNX Runtime refuses the model.
    """

    def __init__(self, model: bytes, level: str = "ORT_ENABLE_ALL", provider: str = "CPUExecutionProvider") -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
        self._session: Any = onnxruntime.InferenceSession(model, options, providers=[provider])
        if provider not in self._session.get_providers():
            raise RuntimeError(f"ONNX Runtime does not have the {provider} here")

    def run(self, inputs: dict[str, Value]) -> list[Value]:
        """Run once; floating inputs are cast to the type that the model declares for them, and others than its own left out."""
        declared = {value.name: value.type for value in self._session.get_inputs()}
        feeds = {name: _fitting(value, declared[name]) for name, value in inputs.items() if name in declared}
        outputs: list[Value] = self._session.run(None, feeds)
        return outputs


def _fitting(value: Value, declared: str) -> Value:
    if isinstance(value, list):
        return [_fitting(part, declared) for part in value]
    wanted = next((dtype for name, dtype in _FLOATS.items() if f"({name})" in declared), None)
    if wanted is None or not isinstance(value, np.ndarray) or value.dtype not in (np.float16, np.float32, np.float64):
        return value
    with np.errstate(over="ignore"):
        return value.astype(wanted)


def rounded(value: Value, half: HalfType = FP16) -> Value:
    """A float32 value, or a sequence of them, as the half type can hold it."""
    if isinstance(value, list):
        return [rounded(part, half) for part in value]
    return half.rounded(value) if isinstance(value, np.ndarray) and value.dtype == np.float32 else value
