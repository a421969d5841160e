"""The program of a child process that opens ONNX models and runs them, so that a bad model kills only this process.

It reads one JSON request a line from standard input and answers in JSON lines on standard output; arrays travel as .npy
files. It imports only numpy and onnxruntime, so that it starts in a fraction of a second, and is started by its path.

Request: `{"model": path, "level": name, "provider": name, "options": {its option: value}, "batches": [{input: file}], "folder":
for the outputs, "weights": [...]}`. A weight, `{"name", "file", "dtype", "elem_type", "offset", "shape"}`, is mapped from its
file in place of the model's.
Answers: `{"stage": "opened", "providers": [...]}`, then for each batch `{"stage": "ran", "outputs": [...], "seconds": of the
run}` or `{"stage": "failed", "error": text}`, and finally `{"stage": "done"}`; or `{"stage": "refused", "error": text}` alone.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import onnxruntime

CUDA = "CUDAExecutionProvider"
BFLOAT16 = 16  # in onnx.TensorProto.DataType
FLOATS = {"tensor(float16)": np.float16, "tensor(float)": np.float32, "tensor(double)": np.float64}


def serve(answers: TextIO, folder: str) -> None:
    """Answer requests until standard input ends, as when the parent dies; then remove `folder` and exit despite a hung run."""
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(requests, folder), daemon=True).start()
    while True:
        for answer in answer_to(json.loads(requests.get())):
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


def answer_to(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Open the model of a request and run its batches."""
    try:
        weights = [_mapped(weight) for weight in request["weights"]]  # must outlive the session
        session = _open(request, weights)
    except Exception as error:  # noqa: BLE001  (the runtime has no base class for what it raises)
        yield {"stage": "refused", "error": first_line(error)}
        return
    yield {"stage": "opened", "providers": session.get_providers()}
    types = {value.name: value.type for value in session.get_inputs()}
    for number, files in enumerate(request["batches"]):
        try:
            feeds = {name: cast_for_input(np.load(file), types[name]) for name, file in files.items()}
            began = time.perf_counter()
            values = session.run(None, feeds)
            seconds = time.perf_counter() - began
            saved = [_saved(value, Path(request["folder"]), f"{number}-{index}") for index, value in enumerate(values)]
        except Exception as error:  # noqa: BLE001  (as above)
            yield {"stage": "failed", "error": first_line(error)}
            continue
        yield {"stage": "ran", "outputs": saved, "seconds": seconds}
    yield {"stage": "done"}


def first_line(error: Exception) -> str:
    """Return the first non-empty line of an error's text."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _read_requests(requests: queue.SimpleQueue[str], folder: str) -> None:
    for line in sys.stdin:
        requests.put(line)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _open(request: dict[str, Any], weights: list[Any]) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, request["level"])
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # other processes may need the cores
    if weights:
        options.add_external_initializers([weight["name"] for weight in request["weights"]], weights)
    if request["provider"] == CUDA:
        from halfserve.nvidia_libraries import load_nvidia_libraries  # noqa: PLC0415  (the CPU needs nothing of the package)

        load_nvidia_libraries()
    provider = (request["provider"], request["options"])
    return onnxruntime.InferenceSession(request["model"], options, providers=[provider])


def _mapped(weight: dict[str, Any]) -> Any:
    values = np.memmap(weight["file"], weight["dtype"], "r", weight["offset"], tuple(weight["shape"]))
    if weight["elem_type"] == BFLOAT16:  # which numpy lacks: mapped as its bits
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(values, BFLOAT16)
    return onnxruntime.OrtValue.ortvalue_from_numpy(values)


def cast_for_input(array: Any, wanted: str) -> Any:
    """Cast a floating array to an input's type, such as "tensor(float16)"; an overflow shows as a non-finite output."""
    dtype = FLOATS.get(wanted)
    if dtype is None or not np.issubdtype(array.dtype, np.floating):
        return array
    with np.errstate(over="ignore"):
        return array.astype(dtype, copy=False)


def _saved(value: Any, folder: Path, name: str) -> dict[str, Any]:
    if value is None:
        return {"kind": "none"}
    if isinstance(value, list) and all(isinstance(item, np.ndarray) for item in value):
        items = [_saved(item, folder, f"{name}-{index}") for index, item in enumerate(value)]
        return {"kind": "sequence", "items": items}
    if not isinstance(value, np.ndarray):
        return {"kind": "other", "type": type(value).__name__}
    file = folder / f"{name}.npy"
    np.save(file, value.astype(np.str_) if value.dtype == object else value, allow_pickle=False)
    return {"kind": "tensor", "file": str(file)}


if __name__ == "__main__":
    # Libraries that print write to standard error, so that standard output holds answers only.
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(channel, sys.argv[1])
