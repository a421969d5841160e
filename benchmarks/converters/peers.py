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

# (serialized model, keep its input and output types) -> serialized float16 model
Convert: TypeAlias = Callable[[bytes, bool], bytes]

SEARCHED = "ours+search"  # uses samples, while `ours` uses only the graph
LOCAL = ("ours", "onnxconverter-common", "onnxruntime.transformers")
MODELOPT = ("modelopt convert_to_f16", "modelopt autocast")


def converter(name: str, modelopt_python: str | None = None) -> Convert:
    """The converter of a name.

    Args:
        name: One of `LOCAL` or of `MODELOPT`, or `SEARCHED`.
        modelopt_python: The interpreter of an environment that has nvidia-modelopt; needed for `MODELOPT`.

    Raises:
        ValueError: There is no such converter, or no interpreter was given for it.
    """
    if name in MODELOPT and modelopt_python is not None:
        return functools.partial(_modelopt, modelopt_python, name.removeprefix("modelopt "))
    if name == SEARCHED:
        searched: Convert = importlib.import_module("benchmarks.converters.searched").ours_searched
        return searched
    local: dict[str, Convert] = dict(zip(LOCAL, (ours, onnxconverter_common, onnxruntime_transformers), strict=True))
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
    """This project's converter."""
    convert = importlib.import_module("halfserve.export.onnx_fp16.convert").convert_float_to_float16
    return _serialized(convert(onnx.load_from_string(model), keep_io_types=keep_io))


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
    """One process with modelopt loaded, which lives as long as this process, as the import takes seconds."""
    program = Path(__file__).with_name("modelopt_server.py")
    return subprocess.Popen([python, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
