"""Tensors that an ONNX file keeps in other files: where these lie, and their bytes.

The runtime would look for them itself: for a model that reaches it as bytes, in the server's working directory. So every path
is checked here when a file is opened, and what becomes bytes takes its tensors in first.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import TypeAlias

import onnx
from onnx import TensorProto

from protos.onnx_tensors import all_tensors
from serve.backends.onnx_runtime.type_attributes import nodes_below
from serve.engine.disk_files import open_regular, require_regular
from serve.engine.errors import ModelLoadError

ENGINE = "EPContext"
IN_MEMORY = "_ORT_MEM_ADDR_"  # of a location by which ONNX Runtime means an address in its own process

_Entries: TypeAlias = dict[str, str]


def locations(model: onnx.ModelProto, path: Path) -> frozenset[str]:
    """Where the tensors of a model lie that are not in its file, as it says it: paths from its folder, and into it.

    Args:
        model: the parsed file.
        path: of the file; for errors.

    Raises:
        ModelLoadError: a tensor says another place, or two.
    """
    return frozenset(_location(tensor, path) for tensor in _external(model))


def data_files(model: onnx.ModelProto, path: Path) -> frozenset[str]:
    """The data files of a model, seen from its folder, all of which are in that folder.

    Args:
        model: the parsed file.
        path: of the file.

    Raises:
        ModelLoadError: a tensor's data lies elsewhere, by its path or by a link, or in what is no regular file.
    """
    found = locations(model, path)
    for location in sorted(found):
        _require_beside(path, location)
    return found


def data_bytes(model: onnx.ModelProto, path: Path) -> int:
    """Bytes that tensors take from data files, each counted by itself: all of its file for one that does not say how many.

    Raises:
        ModelLoadError: a tensor says something else than a number, or another place than the model's folder.
    """
    sizes = {location: _size(path.parent / location) for location in locations(model, path)}
    try:
        lengths = [(_location(tensor, path), _number(_entries(tensor, path), "length")) for tensor in _external(model)]
    except ValueError as error:
        raise ModelLoadError(f"{path}: of its external data, {error}; export the model again") from None
    return sum(sizes[location] if length is None else length for location, length in lengths)


def take_in(model: onnx.ModelProto, path: Path) -> None:
    """Read every tensor that lies in a data file into the message.

    Raises:
        ModelLoadError: such a file is missing, too short, or elsewhere than in the model file's folder.
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
    """Check that no node is a device's compiled program: the runtime would look for its file, and TensorRT would run it.

    Raises:
        ModelLoadError: one is.
    """
    if any(node.op_type == ENGINE for node in nodes_below(model.graph.node, *(f.node for f in model.functions))):
        raise ModelLoadError(f"{path}: holds a program compiled for one device ({ENGINE}), which is not served; export again")


def _external(model: onnx.ModelProto) -> list[TensorProto]:
    return [tensor for tensor in all_tensors(model) if tensor.data_location == TensorProto.EXTERNAL]


def _entries(tensor: TensorProto, path: Path) -> _Entries:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    if len(entries) < len(tensor.external_data):  # readers differ in which of them counts
        raise ModelLoadError(f"{path}: tensor {tensor.name!r} says twice where its data lies; export the model again")
    return entries


def _location(tensor: TensorProto, path: Path) -> str:
    location = _entries(tensor, path).get("location", "")
    # What is not UTF-8 is bytes here. A backslash parts folders on Windows only.
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
    except (OSError, RuntimeError) as error:  # which of them a link to itself is depends on Python
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
    except OSError:  # who reads it says so
        return 0


def _read(file: Path, offset: int | None, length: int | None) -> bytes:
    with open_regular(file) as data:
        start = offset or 0
        size = os.fstat(data.fileno()).st_size
        end = size if length is None else start + length
        if max(start, end) > size:  # before memory is asked for
            raise ValueError(f"it has {size} bytes, expected {max(start, end)}")
        data.seek(start)
        content = data.read(end - start)
    if len(content) < end - start:
        raise ValueError("it became shorter while it was read")
    return content
