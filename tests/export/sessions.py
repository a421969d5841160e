"""ONNX Runtime sessions on the CPU in the test's own process, at a chosen optimisation level."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnxruntime


def open_session(content: bytes, level: str) -> Any:
    """An `onnxruntime.InferenceSession`."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def run_session(session: Any, feeds: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    """Run once; outputs by name."""
    return dict(zip((output.name for output in session.get_outputs()), session.run(None, dict(feeds)), strict=True))
