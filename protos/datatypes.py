"""The dtype table: one row per element type of the protocol, with its name on the wire, on disk, in numpy and in ONNX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from halfserve.protos import model_config_pb2


@dataclass(frozen=True, kw_only=True)
class Datatype:
    """One element type.

    Attributes:
        wire: the name in ModelInferRequest and metadata, such as "FP16".
        config: the DataType number in config.pbtxt, such as TYPE_FP16.
        onnx: the number of TensorProto.DataType.
        itemsize: bytes of one element on the wire; None for BYTES, whose elements carry their own length.
        numpy: the dtype of an array of such elements, little-endian; object for BYTES (each element is `bytes`), and None for
            BF16, which numpy does not have (see `array_dtype`).
        contents: the field of InferTensorContents that carries it; None for types that only travel raw.
    """

    wire: str
    config: int
    onnx: int
    itemsize: int | None
    numpy: np.dtype[Any] | None
    contents: str | None

    @property
    def array_dtype(self) -> np.dtype[Any]:
        """The dtype of an array of such elements. BF16 has ml_dtypes' dtype, imported at first use."""
        if self.numpy is not None:
            return self.numpy
        import ml_dtypes  # noqa: PLC0415  (few models need it)

        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16

    @property
    def config_name(self) -> str:
        """The name in config.pbtxt, such as "TYPE_FP16"."""
        return str(model_config_pb2.DataType.Name(self.config))


def _row(wire: str, onnx: int, numpy: str | None, contents: str | None, *, itemsize: int | None = None) -> Datatype:
    dtype = None if numpy is None else np.dtype(numpy)
    config = model_config_pb2.DataType.Value("TYPE_STRING" if wire == "BYTES" else f"TYPE_{wire}")
    size = dtype.itemsize if dtype is not None and not dtype.hasobject else itemsize
    return Datatype(wire=wire, config=config, onnx=onnx, itemsize=size, numpy=dtype, contents=contents)


DATATYPES = (
    _row("BOOL", 9, "?", "bool_contents"),
    _row("UINT8", 2, "<u1", "uint_contents"),
    _row("UINT16", 4, "<u2", "uint_contents"),
    _row("UINT32", 12, "<u4", "uint_contents"),
    _row("UINT64", 13, "<u8", "uint64_contents"),
    _row("INT8", 3, "<i1", "int_contents"),
    _row("INT16", 5, "<i2", "int_contents"),
    _row("INT32", 6, "<i4", "int_contents"),
    _row("INT64", 7, "<i8", "int64_contents"),
    _row("FP16", 10, "<f2", None),
    _row("FP32", 1, "<f4", "fp32_contents"),
    _row("FP64", 11, "<f8", "fp64_contents"),
    _row("BYTES", 8, "object", "bytes_contents"),
    _row("BF16", 16, None, None, itemsize=2),
)

BY_WIRE = {row.wire: row for row in DATATYPES}
BY_CONFIG = {row.config: row for row in DATATYPES}
BY_ONNX = {row.onnx: row for row in DATATYPES}
