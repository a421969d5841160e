"""A model as a message without the bytes of its initializers, and those initializers beside it, ready to be written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx_ir

from export.files.external_data import external_tensors

INLINE_BYTES = 1024  # smaller tensors are written with the graph: a reference to a file would save little
_PLACEHOLDER = "halfserve.placeholder"


@dataclass(frozen=True, kw_only=True)
class Outline:
    """A model whose large initializers wait to be written.

    Attributes:
        proto: The model's message. The initializers in `tensors` lack their bytes there.
        tensors: Those initializers with their places in `proto`, in the model's order.
    """

    proto: onnx.ModelProto
    tensors: tuple[tuple[onnx_ir.TensorProtocol, onnx.TensorProto], ...]

    @property
    def size_bytes(self) -> int:
        """Size of the whole model in one file, within a few bytes a tensor."""
        return self.proto.ByteSize() + sum(tensor.nbytes for tensor, _ in self.tensors)


@contextmanager
def outlined(model: onnx_ir.Model) -> Iterator[Outline]:
    """Take the large initializers out of a model; on leaving, the model is as it was.

    Raises:
        OSError: A file that holds a tensor of the model cannot be read.
    """
    values = [value for graph in model.graphs() for value in graph.initializers.values() if _is_large(value.const_value)]
    tensors = [value.const_value for value in values]
    try:
        for index, value in enumerate(values):
            value.const_value = _placeholder(value, index)
        proto = onnx_ir.to_proto(model)
        yield Outline(proto=proto, tensors=tuple(_pairs(proto, tensors)))
    finally:
        for value, tensor in zip(values, tensors, strict=True):
            value.const_value = tensor


def _is_large(tensor: onnx_ir.TensorProtocol | None) -> bool:
    return tensor is not None and tensor.dtype != onnx_ir.DataType.STRING and tensor.nbytes >= INLINE_BYTES


def _placeholder(value: onnx_ir.Value, index: int) -> onnx_ir.ExternalTensor:
    tensor = value.const_value
    if tensor is None:
        raise ValueError(value.name)
    return onnx_ir.ExternalTensor(
        _PLACEHOLDER,
        index,
        None,
        tensor.dtype,
        shape=onnx_ir.Shape(tensor.shape.numpy()),
        name=value.name or tensor.name or "",
        doc_string=tensor.doc_string,
        metadata_props=dict(tensor.metadata_props),
    )


def _pairs(
    proto: onnx.ModelProto, tensors: list[onnx_ir.TensorProtocol | None]
) -> Iterator[tuple[onnx_ir.TensorProtocol, onnx.TensorProto]]:
    for tensor in list(external_tensors(proto)):
        place = {entry.key: entry.value for entry in tensor.external_data}
        del tensor.external_data[:]
        tensor.ClearField("data_location")
        if place["location"] != _PLACEHOLDER:
            _take_in(tensor, place)
        elif (taken := tensors[int(place["offset"])]) is not None:
            yield taken, tensor


def _take_in(tensor: onnx.TensorProto, place: dict[str, str]) -> None:
    """Small tensors, and those of Constant nodes, are part of the graph: what a file holds of them is read."""
    with Path(place["location"]).open("rb") as file:
        file.seek(int(place.get("offset", 0)))
        tensor.raw_data = file.read(int(place["length"]) if "length" in place else -1)
