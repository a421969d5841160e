"""An open ONNX file: its graph parsed, its large weights read in pieces, its external data located.

The runtime would resolve the paths of external data itself, for a model given as bytes against the working directory. So all
paths are checked when a file is opened, and models that become bytes load their external data first.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, TypeAlias

import onnx
from google.protobuf.message import DecodeError
from onnx import NodeProto, TensorProto

from halfserve.files.onnx_outline import LARGE_BYTES, ByteRange, OnnxOutline, read_outline
from halfserve.files.onnx_tensors import all_tensors
from halfserve.serve.engine.disk_files import open_regular, require_regular
from halfserve.serve.engine.errors import ModelLoadError

# Files below this size are parsed whole, in a millisecond.
SMALL_FILE_BYTES = 1 << 22
PIECE_BYTES = 1 << 20
ENGINE = "EPContext"
IN_MEMORY = "_ORT_MEM_ADDR_"  # marks a location as an address in ONNX Runtime's process

_Entries: TypeAlias = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class OnnxFile:
    """An open model file, with access to the weights that were left in it."""

    path: Path  # path of the file
    model: onnx.ModelProto  # see `OnnxOutline`
    data_files: frozenset[str]  # external data files, relative to the model's folder and inside it
    _left_out: Mapping[int, ByteRange]
    _file: BinaryIO
    _stamp: tuple[int, int]

    def large_weights(self) -> list[tuple[TensorProto, ByteRange | None]]:
        """Return the weights to move to a file: each with its place in this file, or None if the message holds it."""
        weights = enumerate(self.model.graph.initializer)
        both = ((weight, self._left_out.get(index)) for index, weight in weights)
        return [(weight, place) for weight, place in both if place is not None or _is_large(weight)]

    def pieces(self, weight: TensorProto, place: ByteRange | None) -> Iterator[bytes | memoryview]:
        """Yield the stored bytes of a weight, in pieces of PIECE_BYTES and a rest.
        Raises ModelLoadError: the file has become shorter, or cannot be read.
        """
        if place is None:
            content = memoryview(weight.raw_data)
            yield from (content[at : at + PIECE_BYTES] for at in range(0, len(content), PIECE_BYTES))
            return
        at, end = place.offset, place.offset + place.length
        while at < end:
            yield self._read(at, min(PIECE_BYTES, end - at))
            at += PIECE_BYTES

    def take_in(self) -> None:
        """Read the left-out weights into the message. Raises ModelLoadError: the file has changed, or cannot be read."""
        for weight, place in self.large_weights():
            if place is not None:
                weight.raw_data = self._read(place.offset, place.length)
        self.require_unchanged()

    def require_unchanged(self) -> None:
        """Check that the file was not written to since it was opened. Raises ModelLoadError: the file was written to."""
        if _stamp(self._file) != self._stamp:
            raise _changed(self.path)

    def _read(self, offset: int, length: int) -> bytes:
        try:
            self._file.seek(offset)
            content = self._file.read(length)
        except OSError as error:
            raise ModelLoadError(f"{self.path}: cannot be read: {error.strerror}") from None
        if len(content) < length:
            raise _changed(self.path)
        return content


@contextmanager
def open_onnx(path: Path) -> Iterator[OnnxFile]:
    """Open an ONNX file and parse its graph; external data is not read.
    Raises ModelLoadError: the file cannot be read, is not ONNX, or has external data outside its folder.
    """
    try:
        file = open_regular(path)
    except OSError as error:
        raise _unreadable(path, error) from None
    with file:
        stamp = _stamp(file)
        outline = _outline(path, file, stamp[0])
        files = data_files(outline.model, path)
        yield OnnxFile(path=path, model=outline.model, data_files=files, _left_out=outline.left_out, _file=file, _stamp=stamp)


def _outline(path: Path, file: BinaryIO, size: int) -> OnnxOutline[onnx.ModelProto]:
    try:
        # The file is read as binary, like the runtime does: onnx.load takes some file names for text formats.
        if size > SMALL_FILE_BYTES:
            outline = read_outline(file, size, onnx.ModelProto)
        else:
            outline = OnnxOutline(model=onnx.ModelProto.FromString(file.read()), left_out={})
    except (DecodeError, ValueError, OSError) as error:
        raise _unreadable(path, error) from None
    if not outline.model.HasField("graph") or not outline.model.opset_import:
        raise ModelLoadError(
            f"{path}: is not an ONNX model (no graph in it); expected what torch.onnx.export or onnx.save writes"
        )
    return outline


def _is_large(weight: TensorProto) -> bool:
    """Return whether the message holds a large weight, without copying `raw_data`."""
    return weight.ByteSize() >= LARGE_BYTES and weight.HasField("raw_data")


def _stamp(file: BinaryIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def _unreadable(path: Path, error: Exception) -> ModelLoadError:
    if isinstance(error, OSError):  # an error of the system, not of the model
        return ModelLoadError(f"{path}: cannot be read: {error.strerror or error}")
    return ModelLoadError(f"{path}: is not a readable ONNX file ({str(error).splitlines()[0]}); export it again")


def _changed(path: Path) -> ModelLoadError:
    return ModelLoadError(
        f"{path}: was written to while it was read; load it again once it is complete, or rename it into place"
    )


def locations(model: onnx.ModelProto, path: Path) -> frozenset[str]:
    """Return the locations of external data, as written in the model.
    Raises ModelLoadError: a tensor names another place than a file in the folder, or two places.
    """
    return frozenset(_location(tensor, path) for tensor in _external(model))


def data_files(model: onnx.ModelProto, path: Path) -> frozenset[str]:
    """Return the external data files, relative to the model's folder.
    Raises ModelLoadError: a file lies outside the folder, by its path or by a link, or is not regular.
    """
    found = locations(model, path)
    for location in sorted(found):
        _require_beside(path, location)
    return found


def data_bytes(model: onnx.ModelProto, path: Path) -> int:
    """Return the bytes of external data, shared bytes counted per tensor; a tensor without a length counts its whole file.
    Raises ModelLoadError: a length is not a number, or a place is outside the folder.
    """
    sizes = {location: _size(path.parent / location) for location in locations(model, path)}
    try:
        lengths = [(_location(tensor, path), _number(_entries(tensor, path), "length")) for tensor in _external(model)]
    except ValueError as error:
        raise ModelLoadError(f"{path}: of its external data, {error}; export the model again") from None
    return sum(sizes[location] if length is None else length for location, length in lengths)


def take_in(model: onnx.ModelProto, path: Path) -> None:
    """Read all external data into the message.
    Raises ModelLoadError: a file is missing, too short, or outside the model's folder.
    """
    for tensor in _external(model):
        entries = _entries(tensor, path)
        location = _location(tensor, path)
        _require_beside(path, location)
        try:
            content = _read(path.parent / location, _number(entries, "offset"), _number(entries, "length"))
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ModelLoadError(
                f"{path}: its external data cannot be read ({location}: {reason}); it must lie beside the model"
            ) from None
        del tensor.external_data[:]
        tensor.ClearField("data_location")
        tensor.raw_data = content


def require_no_engine(model: onnx.ModelProto, path: Path) -> None:
    """Check that no node holds a compiled device program: the runtime would open its file, and TensorRT would run it.
    Raises ModelLoadError: a node holds one.
    """
    if any(node.op_type == ENGINE for node in nodes_below(model.graph.node, *(f.node for f in model.functions))):
        raise ModelLoadError(f"{path}: holds a program compiled for one device ({ENGINE}), which is not served; export again")


def nodes_below(*roots: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """Yield nodes, and the nodes of their subgraphs."""
    pending = [list(nodes) for nodes in roots]
    while pending:
        for node in pending.pop():
            yield node
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    pending.append(list(attribute.g.node))
                pending += [list(graph.node) for graph in attribute.graphs]


def _external(model: onnx.ModelProto) -> list[TensorProto]:
    return [tensor for tensor in all_tensors(model) if tensor.data_location == TensorProto.EXTERNAL]


def _entries(tensor: TensorProto, path: Path) -> _Entries:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    if len(entries) < len(tensor.external_data):  # readers differ in their treatment of duplicates
        raise ModelLoadError(f"{path}: tensor {tensor.name!r} says twice where its data lies; export the model again")
    return entries


def _location(tensor: TensorProto, path: Path) -> str:
    location = _entries(tensor, path).get("location", "")
    # Invalid UTF-8 arrives as bytes. A backslash separates folders on Windows only.
    is_path = isinstance(location, str) and location.strip() and not set(location) & set("\0\\") and IN_MEMORY not in location
    if not is_path or PurePosixPath(location).is_absolute() or ".." in PurePosixPath(location).parts:
        raise ModelLoadError(f"{path}: keeps weights in {location!r}, expected a file beside it; export it again")
    return location


def _require_beside(path: Path, location: str) -> None:
    file = path.parent / location
    try:
        is_beside = file.resolve().is_relative_to(path.parent.resolve())
        if is_beside:
            require_regular(file)
    except (OSError, RuntimeError) as error:  # a link to itself raises one of these, depending on the Python version
        reason = error.strerror if isinstance(error, OSError) else "it is a link that leads to itself"
        raise ModelLoadError(f"{file}: cannot be read: {reason}") from None
    if not is_beside:
        raise ModelLoadError(f"{file}: is a link out of the model's folder, expected what lies in it; copy it there")


def _number(entries: _Entries, key: str) -> int | None:
    text = entries.get(key)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"its {key} is {text!r}, expected a number of bytes")
    return int(text)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # reported when the file is read
        return 0


def _read(file: Path, offset: int | None, length: int | None) -> bytes:
    with open_regular(file) as data:
        start = offset or 0
        size = os.fstat(data.fileno()).st_size
        end = size if length is None else start + length
        if max(start, end) > size:  # checked before memory is allocated
            raise ValueError(f"it has {size} bytes, expected {max(start, end)}")
        data.seek(start)
        content = data.read(end - start)
    if len(content) < end - start:
        raise ValueError("it became shorter while it was read")
    return content
