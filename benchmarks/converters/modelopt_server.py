"""Converts with NVIDIA modelopt, for a caller in another environment: a line of JSON and a model in, the same out.

It is run by the Python of an environment that has nvidia-modelopt and needs nothing of this project's.

A request is {"function": "convert_to_f16" or "autocast", "keep_io": bool, "bytes": length} and the model; the answer is
{"bytes": length} and the model, or {"error": text}.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

import onnx


def convert_to_f16(model: bytes, keep_io: bool) -> onnx.ModelProto:
    """modelopt.onnx.autocast's simple function: everything to float16."""
    function = importlib.import_module("modelopt.onnx.autocast").convert_to_f16
    converted: onnx.ModelProto = function(onnx.load_from_string(model), keep_io_types=keep_io)
    return converted


def autocast(model: bytes, keep_io: bool) -> onnx.ModelProto:
    """modelopt.onnx.autocast's full function, which runs the model to choose what stays in float32."""
    function = importlib.import_module("modelopt.onnx.autocast").convert_to_mixed_precision
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        file.write_bytes(model)
        converted: onnx.ModelProto = function(str(file), low_precision_type="fp16", keep_io_types=keep_io)
    return converted


FUNCTIONS = {"convert_to_f16": convert_to_f16, "autocast": autocast}


def answer(request: dict[str, Any], model: bytes, out: IO[bytes]) -> None:
    """Execute a request and write the answer."""
    try:
        content = FUNCTIONS[request["function"]](model, request["keep_io"]).SerializeToString()
    except Exception as error:  # noqa: BLE001  (whatever it is, it is the answer)
        text = (str(error).strip().splitlines() or [""])[0]
        out.write(json.dumps({"error": f"{type(error).__name__}: {text[:300]}"}).encode() + b"\n")
    else:
        out.write(json.dumps({"bytes": len(content)}).encode() + b"\n" + content)
    out.flush()


def main() -> None:
    """Answer until the caller closes the pipe."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # modelopt's prints must not mix with the answers
    while line := sys.stdin.buffer.readline():
        request = json.loads(line)
        answer(request, sys.stdin.buffer.read(request["bytes"]), out)


if __name__ == "__main__":
    main()
