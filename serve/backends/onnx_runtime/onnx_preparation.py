"""From an ONNX file to what a session opens: unchanged on CUDA, upcast to fp32 on the CPU.

Large weights move to a file that the runtime maps. In the message they would be copied three times, with Python's lock held,
and messages end at 2 GiB. From file to file, each piece is read, converted and written without the lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper

from halfserve.protos.onnx_outline import ByteRange
from halfserve.serve.backends.onnx_runtime.onnx_file import OnnxFile, open_onnx, require_no_engine, take_in
from halfserve.serve.backends.onnx_runtime.upcast import FP32, HALF_TYPES, half_types, upcast_to_fp32
from halfserve.serve.engine.disk_files import temporary_folder
from halfserve.serve.engine.errors import ModelLoadError

# From this size of weights on they go to the runtime through a file.
INLINE_BYTES = 1 << 18
# Limit without a file: protobuf serializes at most 2 GiB, and the upcast doubles the size.
MAX_MESSAGE_BYTES = 1 << 30
# A page: the runtime can map weights at such offsets.
ALIGNMENT = 4096
HALF_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class PreparedModel:
    """What a session opens."""

    source: str | bytes  # the model's bytes, or the path of its file
    precision: str  # of the computation, in words: "fp16", "fp32", or "fp32 (the fp16 model, upcast)"
    given_names: Mapping[str, str] = field(default_factory=dict)  # the session's names of renamed inputs


@contextmanager
def prepared(path: Path, *, for_gpu: bool) -> Iterator[PreparedModel]:
    """Prepare a model file; temporary files are removed afterwards.

    NumPy, and with it the runtime's Python interface, has no bf16: such inputs and outputs are fp32 at the session's border.

    Raises:
        ModelLoadError: the file or its external weights cannot be read, or the disk is full.
    """
    with open_onnx(path) as opened:
        model = opened.model
        require_no_engine(model, path)
        halves = half_types(model)
        names = " and ".join(name for number, name in HALF_TYPES.items() if number in halves)
        border = _border(model, for_gpu=for_gpu)
        if not halves or (for_gpu and not border):
            yield PreparedModel(source=str(path), precision=names or "fp32")
            return
        if opened.data_files:
            take_in(model, path)  # bytes have no folder to resolve paths against
        precision = names if for_gpu else f"fp32 (the {names} model, upcast)"
        with _room_for_weights(opened) as folder:
            _settle_weights(opened, folder, upcast=not for_gpu)
            with _must_be_sound(path):
                if not for_gpu:
                    upcast_to_fp32(model)
                given_names = set_border(model, border)
            yield PreparedModel(source=_saved(model, folder, path), precision=precision, given_names=given_names)


@contextmanager
def _must_be_sound(path: Path) -> Iterator[None]:
    """Report malformed weights (wrong size, no type, segments), which nothing has checked before."""
    try:
        yield
    except (ValueError, TypeError, KeyError, onnx.checker.ValidationError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ModelLoadError(f"{path}: is not a sound ONNX model ({reason}); export it again") from error


@contextmanager
def _room_for_weights(opened: OnnxFile) -> Iterator[Path | None]:
    """A temporary folder for large weights; None without large weights."""
    size = large_weights_bytes(opened)
    if size <= INLINE_BYTES:
        yield None
        return
    try:
        folder = temporary_folder("halfserve-")
    except OSError as error:
        if size > MAX_MESSAGE_BYTES:
            reason = f"needs a temporary folder for its weights, and has none ({error}); set TMPDIR"
            raise ModelLoadError(f"{opened.path}: {reason}") from None
        yield None
        return
    with folder as name:
        yield Path(name)


def _settle_weights(opened: OnnxFile, folder: Path | None, *, upcast: bool) -> None:
    if folder is None:
        opened.take_in()
        return
    with _disk_may_be_full(folder, opened.path):
        move_weights(opened, folder / "weights.bin", upcast=upcast)


def _saved(model: onnx.ModelProto, folder: Path | None, path: Path) -> str | bytes:
    content = model.SerializeToString()
    if folder is None:
        return content
    file = folder / "model.onnx"
    with _disk_may_be_full(folder, path):
        file.write_bytes(content)
    return str(file)


@contextmanager
def _disk_may_be_full(folder: Path, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelLoadError(
            f"{path}: its weights could not be written to {folder.parent} ({error.strerror}); set TMPDIR to a folder with room"
        ) from None


def _border(model: onnx.ModelProto, *, for_gpu: bool) -> dict[str, int]:
    """Types of inputs and outputs that differ outside from inside."""
    types = {value.name: value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)}
    if for_gpu:
        return {name: TensorProto.FLOAT for name, number in types.items() if number == TensorProto.BFLOAT16}
    return {name: number for name, number in types.items() if number == TensorProto.FLOAT16}


def set_border(model: ModelProto, types: Mapping[str, int]) -> dict[str, str]:
    """Change the types of inputs and outputs by casts that the runtime computes, in place; inner names and types stay.

    ONNX Runtime converts fp16 with processor instructions, NumPy element by element: 12 and 198 us for an image of 3x224x224.

    Args:
        model: with or without its weights.
        types: TensorProto type outside, by the name of an input or output.

    Returns:
        The new name of every input whose type differed.
    """
    graph = model.graph
    weights = {tensor.name for tensor in graph.initializer}  # IR 3 lists them among the inputs
    renamed = {}
    casts = []
    for value in graph.input:
        inside = value.type.tensor_type.elem_type
        if value.name in weights or types.get(value.name, inside) == inside:
            continue
        outside = f"{value.name}/given"
        casts.append(helper.make_node("Cast", [outside], [value.name], to=inside))
        renamed[value.name] = outside
        value.type.tensor_type.elem_type = types[value.name]
        value.name = outside
    nodes = [*casts, *graph.node]
    for value in graph.output:
        inside = value.type.tensor_type.elem_type
        if types.get(value.name, inside) == inside:
            continue
        outside = f"{value.name}/wanted"
        nodes.append(helper.make_node("Cast", [value.name], [outside], to=types[value.name]))
        value.type.tensor_type.elem_type = types[value.name]
        value.name = outside
    del graph.node[:]
    graph.node.extend(nodes)
    return renamed


def large_weights_bytes(opened: OnnxFile) -> int:
    """Approximate bytes of the weights that `move_weights` would move, before the upcast."""
    return sum(weight.ByteSize() if place is None else place.length for weight, place in opened.large_weights())


def move_weights(opened: OnnxFile, file: Path, *, upcast: bool) -> None:
    """Move large weights to a file, and leave references in the model, which must be saved beside it.

    Args:
        opened: its model is changed in place.
        file: to be written.
        upcast: write fp16 and bf16 as fp32.

    Raises:
        OSError: the file cannot be written.
        ModelLoadError: the model's file cannot be read, or a weight has an impossible size.
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


def _write_upcast(opened: OnnxFile, tensor: TensorProto, place: ByteRange | None, output: BinaryIO) -> None:
    dtype: np.dtype[Any] = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    for piece in opened.pieces(tensor, place):
        if len(piece) % HALF_BYTES:
            raise ModelLoadError(f"{opened.path}: weight {tensor.name!r} ends in the middle of a number; export it again")
        output.write(np.frombuffer(piece, dtype).astype(np.float32).data)
