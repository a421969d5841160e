"""ONNX Runtime sessions on the CPU in our own process, for models that a child process has opened before, or that are our own.

Models from elsewhere run in child processes (`export.verification.children`): some crash the runtime.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime

from export.errors import ExportError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True)
class Probe:
    """How a model was opened.

    Attributes:
        level: The graph optimisation level that works, by its name in `onnxruntime.GraphOptimizationLevel`.
        crashes: What happened at the higher levels, such as "ORT_ENABLE_ALL: killed by SIGSEGV".
    """

    level: str
    crashes: tuple[str, ...] = ()


def open_session(content: bytes, level: str) -> Any:
    """An `onnxruntime.InferenceSession` on the CPU.

    Raises:
        ExportError: The runtime refuses the model.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    try:
        return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ExportError(f"ONNX Runtime cannot open the model: {str(error).splitlines()[0]}") from error


def run_session(session: Any, feeds: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    """Run once; outputs by name.

    Raises:
        ExportError: The runtime refuses the inputs or fails on them.
    """
    try:
        values = session.run(None, dict(feeds))
    except Exception as error:
        raise ExportError(f"ONNX Runtime fails on the samples: {str(error).splitlines()[0]}") from error
    return dict(zip((output.name for output in session.get_outputs()), values, strict=True))
