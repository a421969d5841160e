"""Move a model's large weights into a file, from which the runtime maps them.

As part of the message they would be copied three times on the way (into the message, its bytes, and the runtime's message),
and protobuf holds Python's lock all the while. Here they go from file to file in pieces, and reading, converting and writing a
piece all leave the lock to others. A message also ends at 2 GiB.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from onnx import TensorProto, helper

from serve.backends.onnx_runtime.onnx_file import OnnxFile
from serve.backends.onnx_runtime.onnx_outline import Place
from serve.backends.onnx_runtime.upcast import FP32, HALF_TYPES
from serve.engine.errors import ModelLoadError

# What a page is, or a part of one: the runtime can map a weight that begins there.
ALIGNMENT = 4096
HALF_BYTES = 2


def large_weights_bytes(opened: OnnxFile) -> int:
    """Bytes of the weights that `move_weights` would move, before they are upcast; about, for those within the message."""
    return sum(weight.ByteSize() if place is None else place.length for weight, place in opened.large_weights())


def move_weights(opened: OnnxFile, file: Path, *, upcast: bool) -> None:
    """Write the large weights to a file, and leave references to it in the model, which must be saved beside it.

    Args:
        opened: its model is changed in place.
        file: to be written.
        upcast: write what is fp16 or bf16 as fp32.

    Raises:
        OSError: the file cannot be written.
        ModelLoadError: the model's cannot be read, or a weight's size is none that its type can have.
    """
    with file.open("wb") as output:
        for tensor, place in opened.large_weights():
            offset = -(-output.tell() // ALIGNMENT) * ALIGNMENT
            output.seek(offset)
            moved = TensorProto(name=tensor.name, dims=tensor.dims, data_type=tensor.data_type)
            if upcast and tensor.data_type in HALF_TYPES:
                moved.data_type = FP32
                _write_upcast(opened, tensor, place, output)
            else:
                for piece in opened.pieces(tensor, place):
                    output.write(piece)
            moved.data_location = TensorProto.EXTERNAL
            for key, value in (("location", file.name), ("offset", offset), ("length", output.tell() - offset)):
                moved.external_data.add(key=key, value=str(value))
            tensor.CopyFrom(moved)
    opened.require_unchanged()


def _write_upcast(opened: OnnxFile, tensor: TensorProto, place: Place | None, output: BinaryIO) -> None:
    dtype: np.dtype[Any] = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    for piece in opened.pieces(tensor, place):
        if len(piece) % HALF_BYTES:
            raise ModelLoadError(f"{opened.path}: weight {tensor.name!r} ends in the middle of a number; export it again")
        output.write(np.frombuffer(piece, dtype).astype(np.float32).data)
