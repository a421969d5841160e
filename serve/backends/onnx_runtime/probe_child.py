"""The child process of the crash probe.

It imports few modules, to start quickly. Each trial arrives on stdin as a line of JSON, followed by the model's bytes if it
has no file; each answer is a line of JSON on stdout, once the model has been loaded and run.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnxruntime as ort

from halfserve.nvidia_libraries import load_nvidia_libraries

LOG_NOTHING_BUT_FATAL = 4
# Without this entry the runtime may read a file in ORT format, by its name or first bytes, unlike the check.
FORMAT_ENTRY = ("session.load_model_format", "ONNX")
# ONNX Runtime's type names that differ from NumPy's.
TYPES = {"float": "float32", "double": "float64", "string": "object"}


def main() -> None:
    """Answer trials until stdin ends."""
    _leave_no_core()
    # The runtime's own output must not mix with the answers.
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
        trial: "path", or the number "bytes" of the model that follow in `models`. For ONNX Runtime "level"; "providers", names
            and options; "entries", "parallel", "memory_arena" and "memory_pattern" of the session; "operator_libraries", paths.
            For OpenVINO "openvino", the properties of the compilation; "extension", the path of a library or "".
        models: the stream of model bytes.

    Returns:
        {"refused": reason} if the runtime raised an exception, otherwise {}.
    """
    model = trial["path"] or models.read(trial["bytes"])
    try:
        if "openvino" in trial:
            _try_openvino(model, trial["openvino"], trial["extension"])
            return {}
        if any(name.startswith("CUDA") for name, _ in trial["providers"]):
            load_nvidia_libraries()
        names, choices = zip(*trial["providers"], strict=True)
        session = ort.InferenceSession(model, _options(trial), providers=list(names), provider_options=list(choices))
        session.run(None, {value.name: ones(value) for value in session.get_inputs()})
    except Exception as error:  # noqa: BLE001  (an exception is not a crash)
        return {"refused": str(error)}
    return {}


def _try_openvino(model: str | bytes, properties: dict[str, Any], extension: str) -> None:
    import_module("halfserve.serve.backends.openvino")  # first, so that OpenVINO reports nothing
    import openvino as ov  # noqa: PLC0415  (takes 0.4 s, and may not be installed)

    core = ov.Core()
    if extension:
        core.add_extension(extension)
    compiled = core.compile_model(core.read_model(model=model), "CPU", properties)
    request = compiled.create_infer_request()
    for place, port in enumerate(compiled.inputs):
        tensor = ov.Tensor(port.get_element_type(), [size.get_min_length() or 1 for size in port.get_partial_shape()])
        tensor.data[...] = 1  # in bf16, which numpy shows as fp16, this is another small number
        request.set_input_tensor(place, tensor)
    request.infer(share_outputs=True)


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
    for library in trial["operator_libraries"]:
        options.register_custom_ops_library(library)
    return options


def ones(value: Any, rows: int = 1) -> Any:
    """Make an input filled with ones, because zeros would crash integer divisions.

    An open first dimension gets the size `rows`, other open dimensions get 1.
    """
    shape = [size if isinstance(size, int) else 1 for size in value.shape]
    if shape and not isinstance(value.shape[0], int):
        shape[0] = rows
    kind = value.type.removeprefix("tensor(").removesuffix(")")
    return np.ones(shape, TYPES.get(kind, kind)) if kind != "string" else np.full(shape, "1", object)


def _peak_kb() -> int | None:
    """Return the peak memory of this process in kB; None if unknown.

    getrusage is not used because its value includes the memory of the parent before the fork.
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
