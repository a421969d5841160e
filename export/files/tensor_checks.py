"""Whether each tensor of a model has as many values as its type and shape say.

One of a file that has too few would otherwise be filled up with the bytes that lie behind it there: another weight's.
"""

from __future__ import annotations

import math
from pathlib import Path

import onnx
import onnx_ir

from export.errors import ExportError
from protos.onnx_tensors import all_tensors

PACKED_BITS = (2, 4)  # of elements that share bytes, in int32_data too
_KINDS = onnx.TensorProto
# The fields of those that have one of their own, and how many entries an element takes there; all others are in int32_data.
_FIELDS: dict[int, tuple[str, int]] = {
    _KINDS.FLOAT: ("float_data", 1),
    _KINDS.COMPLEX64: ("float_data", 2),
    _KINDS.DOUBLE: ("double_data", 1),
    _KINDS.COMPLEX128: ("double_data", 2),
    _KINDS.INT64: ("int64_data", 1),
    _KINDS.UINT32: ("uint64_data", 1),
    _KINDS.UINT64: ("uint64_data", 1),
    _KINDS.STRING: ("string_data", 1),
}


def require_whole_tensors(model: onnx.ModelProto, name: str) -> None:
    """Check the tensors whose values are in the model's own file; those of data files are checked where they are looked up.

    Args:
        model: Its element types are ones that ONNX has.
        name: The model, as errors call it.

    Raises:
        ExportError: A tensor has no type, a negative size, or not as many values as it says.
    """
    for tensor in all_tensors(model):
        reason = _fault(tensor)
        if reason is not None:
            raise ExportError(f"{name} is not a valid ONNX model: the tensor {tensor.name!r} {reason}; export it again")


def _fault(tensor: onnx.TensorProto) -> str | None:
    if tensor.data_type == _KINDS.UNDEFINED:
        return "states no element type"
    if any(size < 0 for size in tensor.dims):
        return f"has the shape {list(tensor.dims)}"
    elements = math.prod(tensor.dims)
    if tensor.data_location == _KINDS.EXTERNAL or tensor.HasField("raw_data"):
        return _bytes_fault(tensor, elements)
    field, per_element = _FIELDS.get(tensor.data_type, ("int32_data", 1))
    found, expected = len(getattr(tensor, field)), elements * per_element
    if field == "int32_data" and _bits(tensor) in PACKED_BITS:
        expected = -(-elements * (_bits(tensor) or 0) // 8)
    if found != expected:
        return f"has {found:,} values in {field}, its type and shape say {expected:,}"
    return None


def _bytes_fault(tensor: onnx.TensorProto, elements: int) -> str | None:
    bits = _bits(tensor)
    if bits is None:
        return "has values as bytes, which its element type cannot have"
    found = len(tensor.raw_data)
    if tensor.data_location == _KINDS.EXTERNAL:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if not Path(entries.get("location", "")).is_absolute():  # a data file; see `external_data.stored_at`
            return None
        found = int(entries["length"]) if entries.get("length", "").isdecimal() else found  # left in the model's own file
    if bits % 8 and bits not in PACKED_BITS:  # float6: not everybody packs it
        return None
    expected = -(-elements * bits // 8)
    return None if found == expected else f"has {found:,} bytes, its type and shape say {expected:,}"


def _bits(tensor: onnx.TensorProto) -> int | None:
    """Of one element; None where it has no fixed size."""
    try:
        return onnx_ir.DataType(tensor.data_type).bitwidth
    except (TypeError, ValueError):
        return None
