"""The drop-in name: a float32 ONNX model in, a float16 one out."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import onnx
import onnx_ir

from export.errors import ExportError
from export.files.model_file import open_model
from export.files.sparse_weights import densify
from export.onnx_fp16.convert import convert_upgraded


def convert_float_to_float16(
    model: onnx.ModelProto | Path | str | bytes,
    *,
    keep_io_types: bool | Collection[str] = True,
    op_block_list: Collection[str] | None = None,
    node_block_list: Collection[str] | None = None,
    repair: bool = True,
    upgrade_opset: bool = False,
) -> onnx.ModelProto:
    """Convert a float32 ONNX model to float16; the model that is given stays as it is.

    Args:
        model: A message, the bytes of one, or the path of a file, whose external data is taken in.
        keep_io_types: True: inputs and outputs keep their types; False: they become float16; or names and shell patterns of
            those that keep theirs.
        op_block_list: Operators that stay float32, by name or shell pattern.
        node_block_list: Nodes that stay float32, by name or shell pattern.
        repair: Whether to rewrite first what float16 could not hold.
        upgrade_opset: Whether to raise a model from before opset 17 to it, where a LayerNormalization is one operator; in parts
            it stays float32.

    Returns:
        A new model. For models over 2 GiB use `export.onnx_fp16.model_files.convert_file`.

    Raises:
        ExportError: The model cannot be read or converted, or is over 2 GiB.
    """
    if not isinstance(model, onnx.ModelProto | bytes | Path | str):
        raise ExportError(f"expected an onnx.ModelProto, the bytes of one or a path, not {type(model).__name__}")
    opened = open_model(model)
    source = onnx.ModelProto()
    source.CopyFrom(opened.proto)
    densify(source)
    conversion = convert_upgraded(
        onnx_ir.from_proto(source),
        keep_io_types=keep_io_types,
        op_block_list=op_block_list or (),
        node_block_list=node_block_list or (),
        repair=repair,
        upgrade_opset=upgrade_opset,
    )
    converted = onnx_ir.to_proto(conversion.model)
    converted.training_info.extend(opened.proto.training_info)  # which onnx_ir does not carry
    return converted
