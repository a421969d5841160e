"""ONNX Runtime sessions on the CPU, opened only after a child process has survived opening the same model."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime

from export.atomic_write import write_and_sync
from export.errors import ExportError

if TYPE_CHECKING:
    from collections.abc import Mapping

LEVELS = ("ORT_ENABLE_ALL", "ORT_ENABLE_EXTENDED")
PROBE_TIMEOUT_SECONDS = 300

PROBE = """
import sys, onnxruntime
options = onnxruntime.SessionOptions()
options.log_severity_level = 4
options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, sys.argv[2])
try:
    onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
except Exception as error:
    sys.exit(str(error).splitlines()[0])
"""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """How a model was opened.

    Attributes:
        level: The graph optimisation level that works, by its name in `onnxruntime.GraphOptimizationLevel`.
        crashes: What happened at the levels tried before, such as "ORT_ENABLE_ALL: killed by SIGSEGV".
    """

    level: str
    crashes: tuple[str, ...] = ()


def probe(content: bytes, levels: tuple[str, ...] = LEVELS, program: str = PROBE) -> Probe:
    """Find the first level at which ONNX Runtime opens the model, in a child process: some models crash it.

    Args:
        content: The model's bytes.
        levels: What to try, in this order.
        program: Python source that opens the model of its first argument at the level of its second.

    Raises:
        ExportError: The runtime refuses the model, or crashes at every level.
    """
    crashes: list[str] = []
    with tempfile.TemporaryDirectory(prefix="halfserve-probe-") as folder:
        file = Path(folder) / "model.onnx"
        write_and_sync(file, content)
        for level in levels:
            crash = _crash(file, level, program)
            if crash is None:
                return Probe(level=level, crashes=tuple(crashes))
            crashes.append(f"{level}: {crash}")
    raise ExportError(
        f"ONNX Runtime {onnxruntime.__version__} crashes when it opens the model ({'; '.join(crashes)}); "
        "try another release of it, or keep the affected block in float32 with keep_fp32"
    )


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


def _crash(file: Path, level: str, program: str) -> str | None:
    command = [sys.executable, "-P", "-c", program, str(file), level]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer within {PROBE_TIMEOUT_SECONDS} s"
    if done.returncode == 0:
        return None
    if done.returncode > 0:
        reason = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        raise ExportError(f"ONNX Runtime cannot open the model: {reason}")
    return f"killed by {signal.Signals(-done.returncode).name}"
