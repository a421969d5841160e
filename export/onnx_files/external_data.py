"""Tensors stored outside of the model's message: references to files, mapped tensors, models without weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir

from halfserve.export.export_errors import ExportError
from halfserve.files.onnx_tensors import all_tensors

INLINE_BYTES = 1024  # smaller tensors are written with the graph: a reference to a file would save little
_PLACEHOLDER = "halfserve.placeholder"


@dataclass(frozen=True, kw_only=True)
class Stored:
    """The place of one tensor's bytes: offset and length in a file, whose path is relative to the model's folder."""

    location: str
    offset: int
    length: int


def stored_at(tensor: onnx.TensorProto, folder: Path, name: str) -> Stored:
    """Read and check a tensor's reference to a file in the model's folder; `name` is the model's in errors.

    Raises:
        ExportError: The file is missing, too short, or outside of the model's folder, or the reference is invalid.
    """
    entries = {entry.key: entry.value for entry in tensor.external_data}
    what = f"{name}: the external data of tensor {tensor.name!r}"
    location = entries.get("location", "")
    file = _inside(folder, location, what)
    try:
        available = file.stat().st_size
    except OSError as error:
        raise ExportError(
            f"{what} should be in {folder / location}: {error.strerror}; put the model's data files beside it"
        ) from error
    if not file.is_file():  # a pipe, for example, would block the reader
        raise ExportError(f"{what} should be in {folder / location}, which is no file; export the model again")
    needed = _nbytes(tensor, what)
    try:
        offset, length = int(entries.get("offset", 0)), int(entries.get("length", needed))
    except ValueError as error:
        raise ExportError(f"{what} has an offset or length that is no number; export the model again") from error
    if length != needed or offset < 0:
        raise ExportError(f"{what} says offset {offset} and length {length}; the tensor has {needed} bytes; export it again")
    if offset + length > available:
        raise ExportError(
            f"{what} ends at byte {offset + length:,} of {location}, which has {available:,}; "
            "the file is cut short or of another model"
        )
    return Stored(location=location, offset=offset, length=length)


def data_files(model: onnx.ModelProto) -> tuple[str, ...]:
    """Locations of the model's data files, in order of first mention."""
    return tuple(dict.fromkeys(location_of(tensor) for tensor in external_tensors(model)))


def external_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Return the tensors whose bytes lie in files."""
    return (tensor for tensor in all_tensors(model) if tensor.data_location == onnx.TensorProto.EXTERNAL)


def location_of(tensor: onnx.TensorProto) -> str:
    """Return the location of an external tensor's file, as the model states it."""
    return next((entry.value for entry in tensor.external_data if entry.key == "location"), "")


def take_in(tensor: onnx.TensorProto, folder: Path, name: str) -> None:
    """Read into its message an external tensor's bytes, from a file beside the model or at a checked absolute path.

    Raises:
        ExportError: See `stored_at`.
    """
    location = location_of(tensor)
    if Path(location).is_absolute():
        entries = {entry.key: int(entry.value) for entry in tensor.external_data if entry.key != "location"}
        file, offset, length = Path(location), entries["offset"], entries["length"]
    else:
        stored = stored_at(tensor, folder, name)
        file, offset, length = folder / stored.location, stored.offset, stored.length
    _read_in(tensor, file, offset, length)


def _read_in(tensor: onnx.TensorProto, file: Path, offset: int, length: int) -> None:
    with file.open("rb") as data:
        data.seek(offset)
        tensor.raw_data = data.read(length)
    tensor.ClearField("external_data")
    tensor.ClearField("data_location")


def _nbytes(tensor: onnx.TensorProto, what: str) -> int:
    try:
        bits = onnx_ir.DataType(tensor.data_type).bitwidth
    except (ValueError, TypeError) as error:
        raise ExportError(f"{what} has an element type that cannot lie in a file; export the model again") from error
    elements = int(np.prod(tensor.dims, dtype=object)) if tensor.dims else 1
    return (elements * bits + 7) // 8


def _inside(folder: Path, location: str, what: str) -> Path:
    path = Path(location)
    if not location or path.is_absolute() or ".." in path.parts or "\0" in location:
        raise ExportError(f"{what} has the location {location!r}; expected a file in the model's folder")
    file, home = (folder / path).resolve(), folder.resolve()
    if not file.is_relative_to(home):
        raise ExportError(f"{what} is a link out of the model's folder, to {file}; copy the files instead (cp -rL)")
    return file


class FileTensor(onnx_ir.ExternalTensor):
    """An external tensor that maps its own bytes at each access, and holds nothing.

    onnx_ir's own tensor maps the whole file and holds the map until it is released, so that reading a model tensor by tensor
    ends with all of it in memory.
    """

    __slots__ = ()

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return the tensor, mapped; the memory is released with the array.

        Raises:
            ExportError: The file is gone or shorter than it was.
        """
        dtype = self.dtype.numpy()
        if self.dtype.bitwidth < 8:  # several elements share a byte: onnx_ir unpacks them
            return super().numpy()
        if self.size == 0:
            return np.empty(self.shape.numpy(), dtype)
        try:
            mapped = np.memmap(self.path, dtype, "r", self.offset or 0, self.shape.numpy())
        except (OSError, ValueError) as error:
            raise ExportError(f"cannot read tensor {self.name!r} from {self.path}: {error}") from error
        return np.asarray(mapped)

    def __array__(self, dtype: Any = None) -> np.ndarray[Any, Any]:
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    def tobytes(self) -> bytes:
        """Return a copy of the bytes."""
        return self.numpy().tobytes() if self.dtype.bitwidth >= 8 else super().tobytes()


def map_tensors(model: onnx_ir.Model, folder: Path) -> None:
    """Make a `FileTensor` with an absolute path of every external tensor of a model in `folder`, in place."""
    for graph in model.graphs():
        for value in graph.initializers.values():
            if isinstance(value.const_value, onnx_ir.ExternalTensor):
                value.const_value = _mapped(value.const_value, folder)
    for node in onnx_ir.traversal.RecursiveGraphIterator(model.graph):
        _map_attributes(node, folder)
    for function in model.functions.values():
        for node in onnx_ir.traversal.RecursiveGraphIterator(function):
            _map_attributes(node, folder)


def _map_attributes(node: onnx_ir.Node, folder: Path) -> None:
    for name, attribute in list(node.attributes.items()):
        if attribute.is_ref():
            continue
        value: Any = attribute.value
        if attribute.type == onnx_ir.AttributeType.TENSOR and isinstance(value, onnx_ir.ExternalTensor):
            node.attributes[name] = onnx_ir.AttrTensor(name, _mapped(value, folder), attribute.doc_string)
        elif attribute.type == onnx_ir.AttributeType.TENSORS:
            tensors = [_mapped(t, folder) if isinstance(t, onnx_ir.ExternalTensor) else t for t in value]
            node.attributes[name] = onnx_ir.AttrTensors(name, tensors, attribute.doc_string)


def _mapped(tensor: onnx_ir.ExternalTensor, folder: Path) -> FileTensor:
    return FileTensor(
        str(folder / tensor.location),
        tensor.offset,
        tensor.nbytes,
        tensor.dtype,
        shape=tensor.shape,
        name=tensor.name,
        doc_string=tensor.doc_string,
        metadata_props=dict(tensor.metadata_props),
    )


@dataclass(frozen=True, kw_only=True)
class DetachedModel:
    """A model's message, and the large initializers that it lacks, each with its message in `proto`, in the model's order."""

    proto: onnx.ModelProto
    tensors: tuple[tuple[onnx_ir.TensorProtocol, onnx.TensorProto], ...]

    @property
    def size_bytes(self) -> int:
        """Size of the whole model in one file, within a few bytes a tensor."""
        return self.proto.ByteSize() + sum(tensor.nbytes for tensor, _ in self.tensors)


@contextmanager
def detached(model: onnx_ir.Model) -> Iterator[DetachedModel]:
    """Detach the large initializers from a model; on leaving, they are attached again.

    Raises:
        OSError: A file that holds a tensor of the model cannot be read.
    """
    values = [value for graph in model.graphs() for value in graph.initializers.values() if _is_large(value.const_value)]
    tensors = [value.const_value for value in values]
    try:
        for index, value in enumerate(values):
            value.const_value = _placeholder(value, index)
        proto = onnx_ir.to_proto(model)
        yield DetachedModel(proto=proto, tensors=tuple(_pairs(proto, tensors)))
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
        if place["location"] != _PLACEHOLDER:  # a small tensor, or one of a Constant node, is part of the graph
            length = int(place["length"]) if "length" in place else -1
            _read_in(tensor, Path(place["location"]), int(place.get("offset", 0)), length)
            continue
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")
        if (taken := tensors[int(place["offset"])]) is not None:
            yield taken, tensor
