"""Models as they come: an ONNX message, its bytes, or a path to them."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

import onnx
from google.protobuf.message import DecodeError

from export.errors import ExportError
from export.to_onnx.export_onnx import serialize

ModelSource: TypeAlias = onnx.ModelProto | bytes | Path | str


def load_model(source: ModelSource) -> tuple[onnx.ModelProto, bytes]:
    """The model as a message and as the bytes that are or would be its file.

    Raises:
        ExportError: The file is missing, unreadable or no ONNX model, or its weights lie in other files.
    """
    if isinstance(source, onnx.ModelProto):
        return source, serialize(source)
    name = "the model" if isinstance(source, bytes) else str(source)
    content = source if isinstance(source, bytes) else _read(Path(source))
    try:
        model = onnx.load_from_string(content)
    except (DecodeError, ValueError) as error:
        raise ExportError(f"{name} is not an ONNX model or is damaged") from error
    if not model.graph.output:
        raise ExportError(f"{name} is not an ONNX model or is damaged: it has no outputs")
    if any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in model.graph.initializer):
        raise ExportError(f"{name} keeps weights in other files; expected a single file (onnx.save without external data)")
    return model, content


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ExportError(f"cannot read the model {path}: {error.strerror or error}") from error
