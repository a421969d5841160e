"""The converters under test, behind one interface."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import io
import json
import logging
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeAlias, cast

import onnx

from benchmarks.converters.synthetic_inputs import trials
from halfserve.export.certificate.budget import Budget
from halfserve.export.onnx_fp16.convert import convert_float_to_float16
from halfserve.export.search.smallest_fp32_set import find_fp32_nodes

# (serialized model, keep its input and output types) -> serialized float16 model
Convert: TypeAlias = Callable[[bytes, bool], bytes]

SEARCHED = "ours+search"  # uses samples, while `ours` uses only the graph
LOCAL = ("ours", "onnxconverter-common", "onnxruntime.transformers")
MAX_RUNS = 60  # runs of the search
MODELOPT = ("modelopt convert_to_f16", "modelopt autocast")


def converter(name: str, modelopt_python: str | None = None) -> Convert:
    """Return the converter of a name.

    Args:
        name: One of `LOCAL` or of `MODELOPT`, or `SEARCHED`.
        modelopt_python: The interpreter of an environment that has nvidia-modelopt; needed for `MODELOPT`.

    Raises:
        ValueError: There is no such converter, or no interpreter was given for it.
    """
    if name in MODELOPT and modelopt_python is not None:
        return functools.partial(_modelopt, modelopt_python, name.removeprefix("modelopt "))
    functions = (ours_searched, ours, onnxconverter_common, onnxruntime_transformers)
    local: dict[str, Convert] = dict(zip((SEARCHED, *LOCAL), functions, strict=True))
    if name not in local:
        raise ValueError(f"no converter {name!r}, or the Python that has modelopt was not named")
    return local[name]


def versions(modelopt_python: str | None = None) -> dict[str, str]:
    """Versions of the compared distributions, by name."""
    found = {name: importlib.metadata.version(name) for name in ("onnx", "onnxruntime-gpu", "onnxconverter-common", "onnx-ir")}
    if modelopt_python is not None:
        program = "import importlib.metadata as m; print(m.version('nvidia-modelopt'))"
        done = subprocess.run([modelopt_python, "-c", program], capture_output=True, text=True, check=True)
        found["nvidia-modelopt"] = done.stdout.strip()
    return found


def ours(model: bytes, keep_io: bool) -> bytes:
    """Convert with this project's converter."""
    return _serialized(convert_float_to_float16(onnx.load_from_string(model), keep_io_types=keep_io))


def ours_searched(model: bytes, keep_io: bool) -> bytes:
    """Convert with this project's converter and its search for float32 nodes, as `halfserve convert` does with samples.

    The generated inputs of `synthetic_inputs` stay within the default budget, 1 % of an output's scale.

    Raises:
        ValueError: The float32 model accepts none of the generated inputs.
    """
    feeds = [trial.feeds for trial in trials(model)]
    if not feeds:
        raise ValueError("the float32 model takes none of the made-up inputs")
    source = onnx.load_from_string(model)
    found = find_fp32_nodes(source, feeds, budget=Budget(), keep_io_types=keep_io, adversarial=False, max_runs=MAX_RUNS)
    return _serialized(convert_float_to_float16(source, keep_io_types=keep_io, keep_fp32_nodes=found.keep_fp32_nodes))


def onnxconverter_common(model: bytes, keep_io: bool) -> bytes:
    """onnxconverter-common's `convert_float_to_float16`, as its documentation calls it."""
    module = importlib.import_module("onnxconverter_common.float16")
    with _quiet():
        return _serialized(module.convert_float_to_float16(onnx.load_from_string(model), keep_io_types=keep_io))


def onnxruntime_transformers(model: bytes, keep_io: bool) -> bytes:
    """onnxruntime.transformers' `convert_float_to_float16`."""
    module = importlib.import_module("onnxruntime.transformers.float16")
    with _quiet():
        return _serialized(module.convert_float_to_float16(onnx.load_from_string(model), keep_io_types=keep_io))


def _serialized(model: onnx.ModelProto) -> bytes:
    return model.SerializeToString(deterministic=True)


@contextlib.contextmanager
def _quiet() -> Any:
    """Silence the peers' warnings about every changed weight; the judge examines the results."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _modelopt(python: str, function: str, model: bytes, keep_io: bool) -> bytes:
    server = _modelopt_server(python)
    requests, answers = cast("IO[bytes]", server.stdin), cast("IO[bytes]", server.stdout)
    head = json.dumps({"function": function, "keep_io": keep_io, "bytes": len(model)})
    requests.write(head.encode() + b"\n" + model)
    requests.flush()
    line = answers.readline()
    if not line:
        _modelopt_server.cache_clear()
        raise RuntimeError(f"modelopt's process ended with status {server.wait()}")
    answer = json.loads(line)
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answers.read(answer["bytes"])


@functools.cache
def _modelopt_server(python: str) -> subprocess.Popen[bytes]:
    """Return one process with modelopt loaded, which lives as long as this process, as the import takes seconds."""
    program = Path(__file__).with_name("modelopt_server.py")
    return subprocess.Popen([python, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
