"""The reason for which a converted model's file is larger than its source."""

from __future__ import annotations

from math import prod

import onnx

from halfserve.export.onnx_files.model_file import ModelFile
from halfserve.export.onnx_files.proto_graphs import all_nodes
from halfserve.files.onnx_tensors import all_tensors


def growth(source: ModelFile, converted: ModelFile) -> str | None:
    """Why `converted` takes more bytes than `source`, as the parts that grew and shrank, the largest growth first.

    Returns:
        "than its source by 900 bytes: 1,000 more in casts, 100 fewer in weights"; None where it is not larger.
    """
    more = converted.size_bytes - source.size_bytes
    if more <= 0:
        return None
    before, after = _parts(source), _parts(converted)
    changes = sorted(((after[part] - before[part], part) for part in after if after[part] != before[part]), reverse=True)
    texts = [f"{abs(change):,} {'more' if change > 0 else 'fewer'} in {part}" for change, part in changes]
    return f"than its source by {_bytes(more)}: {', '.join(texts)}"


def _parts(model: ModelFile) -> dict[str, int]:
    """Bytes by part of the files; together their size."""
    outline = model.outline
    parts = {
        "weights": sum(_tensor_bytes(tensor) for tensor in all_tensors(outline)),
        "casts": sum(node.ByteSize() for node in all_nodes(outline) if node.op_type == "Cast" and not node.domain),
        "metadata, where the conversion and the certificate are named": sum(e.ByteSize() for e in outline.metadata_props),
    }
    return {**parts, "nodes and names": model.size_bytes - sum(parts.values())}


def _tensor_bytes(tensor: onnx.TensorProto) -> int:
    if tensor.data_type == onnx.TensorProto.STRING:
        return sum(len(text) for text in tensor.string_data)
    return prod(tensor.dims) * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize


def _bytes(count: int) -> str:
    return f"{count:,} byte" if count == 1 else f"{count:,} bytes"
