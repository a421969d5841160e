"""Tensors into files, one in memory at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np
import onnx
import onnx_ir

from export.errors import ExportError
from export.files.large_tensors import length_delimited
from export.files.tensor_outline import Outline

PAGE_BYTES = 4096
PAGE_ALIGNED_FROM_BYTES = 1 << 20  # so that a runtime can map large weights; padding then costs at most 0.4 %
ALIGNMENT_BYTES = 64  # a cache line

# Field numbers of onnx.proto.
MODEL_GRAPH, GRAPH_INITIALIZER, TENSOR_RAW_DATA = 7, 5, 9
_LAST_FIELD = 2**29

_Message = TypeVar("_Message", onnx.ModelProto, onnx.GraphProto, onnx.TensorProto)


@contextmanager
def synced(path: Path) -> Iterator[BinaryIO]:
    """A new file whose bytes are on the disk when it is closed.

    Raises:
        OSError: As the system reports it (FileExistsError where something is already there).
    """
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def write_padded(file: BinaryIO, tensor: onnx_ir.TensorProtocol) -> int:
    """Append a tensor's bytes where runtimes like them to begin.

    Returns:
        Where that is: a multiple of the page size for a large tensor, else of a cache line.
    """
    alignment = PAGE_BYTES if tensor.nbytes >= PAGE_ALIGNED_FROM_BYTES else ALIGNMENT_BYTES
    position = file.tell()
    offset = -(-position // alignment) * alignment
    file.write(bytes(offset - position))
    write_tensor(file, tensor)
    return offset


def write_tensor(file: BinaryIO, tensor: onnx_ir.TensorProtocol) -> None:
    """Append a tensor's bytes, little-endian, packed where elements are smaller than a byte.

    Raises:
        ExportError: The tensor has not as many bytes as it says.
    """
    start = file.tell()
    if isinstance(tensor, onnx_ir.ExternalTensor):
        tensor.tofile(file)  # from file to file, inside the kernel where it can
    elif tensor.dtype.bitwidth < 8 or isinstance(tensor, onnx_ir.serde.TensorProtoTensor):
        file.write(tensor.tobytes())
    else:
        array = np.ascontiguousarray(tensor.numpy())
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        file.write(little.reshape(-1).view(np.uint8).data)
    if file.tell() - start != tensor.nbytes:
        raise ExportError(f"tensor {tensor.name!r} has {file.tell() - start:,} bytes, its type and shape say {tensor.nbytes:,}")


def write_in_one_file(file: BinaryIO, outline: Outline) -> None:
    """Write the model's message with all its tensors, as protobuf would, without ever having it whole in memory.

    The initializers of the main graph are appended one by one; the few large ones of bodies are taken into the message first.
    """
    main = {id(proto): tensor for tensor, proto in outline.tensors}
    initializers = list(outline.proto.graph.initializer)
    ours = {id(proto) for proto in initializers}
    for tensor, proto in outline.tensors:
        if id(proto) not in ours:
            proto.raw_data = tensor.tobytes()
    graph = outline.proto.graph
    before, after = _fields(graph, 0, GRAPH_INITIALIZER), _fields(graph, GRAPH_INITIALIZER, _LAST_FIELD)
    entries = [_Entry(proto, main.get(id(proto))) for proto in initializers]
    length = len(before) + sum(entry.size for entry in entries) + len(after)
    file.write(_fields(outline.proto, 0, MODEL_GRAPH) + length_delimited(MODEL_GRAPH, length) + before)
    for entry in entries:
        entry.write(file)
    file.write(after + _fields(outline.proto, MODEL_GRAPH, _LAST_FIELD))


class _Entry:
    """One initializer in a graph's message: its own message around its bytes."""

    def __init__(self, proto: onnx.TensorProto, tensor: onnx_ir.TensorProtocol | None) -> None:
        self.tensor = tensor
        if tensor is None:
            self.before, self.after, nbytes = proto.SerializeToString(deterministic=True), b"", 0
        else:
            nbytes = tensor.nbytes
            self.before = _fields(proto, 0, TENSOR_RAW_DATA) + length_delimited(TENSOR_RAW_DATA, nbytes)
            self.after = _fields(proto, TENSOR_RAW_DATA, _LAST_FIELD)
        body = len(self.before) + nbytes + len(self.after)
        self.key = length_delimited(GRAPH_INITIALIZER, body)
        self.size = len(self.key) + body

    def write(self, file: BinaryIO) -> None:
        file.write(self.key + self.before)
        if self.tensor is not None:
            write_tensor(file, self.tensor)
        file.write(self.after)


def _fields(message: _Message, above: int, below: int) -> bytes:
    """The fields of a message between two numbers, both excluded, as bytes."""
    part = type(message)()
    part.CopyFrom(message)
    for field, _ in message.ListFields():
        if not above < field.number < below:
            part.ClearField(field.name)
    return part.SerializeToString(deterministic=True)
