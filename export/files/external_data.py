"""Tensors whose bytes lie in files: where, and whether they are all there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx_ir

from export.errors import ExportError
from protos.onnx_tensors import all_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Where one tensor's bytes lie.

    Attributes:
        location: As the model says it: relative to the model's folder, or the path of the model file itself.
        offset: In bytes from the file's start.
        length: In bytes.
    """

    location: str
    offset: int
    length: int


def stored_at(tensor: onnx.TensorProto, folder: Path, name: str) -> Stored:
    """Read and check a tensor's reference to a file.

    Args:
        tensor: One with external data.
        folder: The model's folder.
        name: The model, as errors call it.

    Raises:
        ExportError: The file is missing, too short, or outside of the model's folder, or the reference makes no sense.
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
    if not file.is_file():  # a pipe would keep the reader waiting
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
    """The tensors whose bytes lie in files."""
    return (tensor for tensor in all_tensors(model) if tensor.data_location == onnx.TensorProto.EXTERNAL)


def location_of(tensor: onnx.TensorProto) -> str:
    """The file that holds an external tensor, as the model says it."""
    return next((entry.value for entry in tensor.external_data if entry.key == "location"), "")


def take_in(tensor: onnx.TensorProto, folder: Path, name: str) -> None:
    """Read an external tensor's bytes into its message.

    Args:
        tensor: One with external data, in a file beside the model or at an absolute path that was checked before.
        folder: The model's folder.
        name: The model, as errors call it.

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
