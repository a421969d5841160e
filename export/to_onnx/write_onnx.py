"""A traced model on disk: checked, whole or not at all, with its weights beside it where one file cannot hold them."""

from __future__ import annotations

import re
from pathlib import Path

import onnx
import onnx_ir

from export.errors import ExportError
from export.onnx_files.model_file import PROTOBUF_LIMIT_BYTES, serialize
from export.onnx_files.model_writer import ExternalData, staged_model, write_atomically
from export.to_onnx.messages import one_line

SIZES_ROUNDED = frozenset({"AveragePool", "MaxPool", "Resize"})


def write_onnx(
    model: onnx_ir.Model,
    path: Path | str | None,
    *,
    external_data: ExternalData = "auto",
    limit_bytes: int = PROTOBUF_LIMIT_BYTES,
) -> onnx.ModelProto:
    """Check a model with ONNX's full checker, and write it; its doubts about how sizes round are passed over.

    Args:
        model: The model; its weights may still be torch's tensors, and are copied one at a time where they go into a data file.
        path: Where to; its folder must exist. None only checks.
        external_data: Whether the weights go into a data file beside `path`: "auto" does so for a model over `limit_bytes`.
        limit_bytes: The most that one file holds; ONNX's format allows 2 GiB.

    Returns:
        What was written. Where the weights went into a data file, it refers to that file.

    Raises:
        ExportError: The model is not valid, is over the limit and has no `path` or may not have a data file, or cannot be
            written.
    """
    size = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value is not None)
    if external_data == "no" and size > limit_bytes:
        raise ExportError(f"the weights take {size / 2**30:.1f} GiB, too much for one file; allow external data")
    if external_data == "no" or (external_data == "auto" and size <= limit_bytes):
        return _whole(model, path)
    if path is None:
        raise ExportError(f"the weights take {size / 2**30:.1f} GiB; give a path, beside which they can be stored")
    with staged_model(model, path, external_data="yes", limit_bytes=limit_bytes) as staged:
        _check(str(staged.path))
        staged.publish()
    return onnx.load(path, load_external_data=False)


def _whole(model: onnx_ir.Model, path: Path | str | None) -> onnx.ModelProto:
    proto = onnx_ir.to_proto(model)
    _check(proto)
    if path is not None:
        write_atomically(path, serialize(proto))
    return proto


def _check(model: onnx.ModelProto | str) -> None:
    try:
        onnx.checker.check_model(model, full_check=True)
    except onnx.shape_inference.InferenceError as error:
        if not _is_about_rounded_sizes(str(error)):
            raise ExportError(f"the exported model is not valid ONNX: {one_line(error)}") from error
        onnx.checker.check_model(model)
    except (onnx.checker.ValidationError, ValueError) as error:
        raise ExportError(f"the exported model is not valid ONNX: {one_line(error)}") from error


def _is_about_rounded_sizes(message: str) -> bool:
    """Whether the checker only doubts sizes of pictures that are one more or less to it than to torch and the runtimes.

    The checker takes 10 times 0.7 for 6 where both say 7, and counts windows in the padding that both leave out.
    """
    named = re.findall(r"\(op_type:(\w+)", message)
    sizes = re.findall(r"Inferred shape and existing shape differ in dimension [2-9]: \((\d+)\) vs \((\d+)\)", message)
    by_one = all(abs(int(inferred) - int(stated)) == 1 for inferred, stated in sizes)
    return bool(named) and len(named) == len(sizes) and by_one and {*named} <= SIZES_ROUNDED
