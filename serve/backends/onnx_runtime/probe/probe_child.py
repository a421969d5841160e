"""The program of the process that dies where a model ends its process; see crash_probe.

It imports as little as possible, so that it starts quickly. Each trial comes on stdin as a line of JSON and the model's bytes,
where it has no file; each answer goes out as a line of JSON once the model has been loaded and run.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnxruntime as ort

LOG_NOTHING_BUT_FATAL = 4
# Otherwise a file's name or its first bytes may have the runtime read it in its own format, which is not what was checked.
FORMAT_ENTRY = ("session.load_model_format", "ONNX")
# ONNX Runtime's names that differ from numpy's.
TYPES = {"float": "float32", "double": "float64", "string": "object"}


def main() -> None:
    """Answer trials until stdin ends."""
    _leave_no_core()
    # What the runtime prints must not get between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, sys.stdout.fileno())
    ort.set_default_logger_severity(LOG_NOTHING_BUT_FATAL)
    trials = sys.stdin.buffer
    while line := trials.readline():
        answer = try_out(json.loads(line), trials) | {"peak_kb": _peak_kb()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def try_out(trial: dict[str, Any], models: BinaryIO) -> dict[str, Any]:
    """Load and run a model once.

    Args:
        trial: "path", or "bytes" of the model that follow in `models`; "level"; "providers", names and options; "entries",
            "parallel", "memory_arena" and "memory_pattern" of the session.
        models: where the bytes follow.

    Returns:
        {"refused": reason}: the runtime raised an exception; empty where it did not. Either way the process lives.
    """
    model = trial["path"] or models.read(trial["bytes"])
    try:
        if any(name.startswith("CUDA") for name, _ in trial["providers"]):
            ort.preload_dlls()
        names, choices = zip(*trial["providers"], strict=True)
        session = ort.InferenceSession(model, _options(trial), providers=list(names), provider_options=list(choices))
        session.run(None, {value.name: ones(value) for value in session.get_inputs()})
    except Exception as error:  # noqa: BLE001  (what the runtime raises is no crash, whatever it is)
        return {"refused": str(error)}
    return {}


def _options(trial: dict[str, Any]) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = LOG_NOTHING_BUT_FATAL
    options.graph_optimization_level = ort.GraphOptimizationLevel(trial["level"])
    options.intra_op_num_threads = 1
    options.enable_cpu_mem_arena = trial["memory_arena"]
    options.enable_mem_pattern = trial["memory_pattern"]
    if trial["parallel"]:
        options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    for key, value in trial["entries"].items():
        options.add_session_config_entry(key, value)
    options.add_session_config_entry(*FORMAT_ENTRY)
    return options


def ones(value: Any, rows: int = 1) -> Any:
    """An input of nothing but ones. Not zeros: whole numbers that a model divides by would end the process by themselves.

    Args:
        value: the session's input.
        rows: of the first dimension where it is of any size; other such dimensions get one.
    """
    shape = [size if isinstance(size, int) else 1 for size in value.shape]
    if shape and not isinstance(value.shape[0], int):
        shape[0] = rows
    kind = value.type.removeprefix("tensor(").removesuffix(")")
    return np.ones(shape, TYPES.get(kind, kind)) if kind != "string" else np.full(shape, "1", object)


def _peak_kb() -> int | None:
    """The most memory that this process has held; None where the system does not tell.

    Not getrusage's: what it says begins with what the process held that started this one.
    """
    with contextlib.suppress(OSError), Path("/proc/self/status").open(encoding="ascii") as lines:
        return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)
    return None


def _leave_no_core() -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource  # noqa: PLC0415  (Windows has none)

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
