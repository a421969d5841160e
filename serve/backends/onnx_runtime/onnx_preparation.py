"""Turns an ONNX file into the model that a runtime opens: unchanged on CUDA; upcast to fp32, or from fp16 to bf16, on the CPU.

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

from halfserve.files.onnx_outline import ByteRange
from halfserve.serve.backends.onnx_runtime.onnx_file import OnnxFile, open_onnx, require_no_engine, take_in
from halfserve.serve.backends.onnx_runtime.upcast import HALF_TYPES, UPCAST, half_types, retype
from halfserve.serve.engine.disk_files import temporary_folder
from halfserve.serve.engine.errors import ModelLoadError

# From this total size on, weights reach the runtime through a file.
INLINE_BYTES = 1 << 18
# Most bytes of weights without a file: protobuf serializes at most 2 GiB, and the upcast doubles the size.
MAX_MESSAGE_BYTES = 1 << 30
# One page: the runtime can map weights at multiples of it.
ALIGNMENT = 4096
HALF_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class PreparedModel:
    """The model that a session opens."""

    source: str | bytes  # the model's bytes, or the path of its file
    precision: str  # precision of the computation, in words: "fp16", "fp32", or "fp32 (the fp16 model, upcast)"
    given_names: Mapping[str, str] = field(default_factory=dict)  # the session's name of each renamed input
    halves: frozenset[str] = frozenset()  # half-precision types in the file, such as "fp16"


@contextmanager
def prepared(path: Path, *, for_gpu: bool, types: Mapping[int, int] | None = None) -> Iterator[PreparedModel]:
    """Prepare a model file; temporary files are removed afterwards.

    NumPy, and with it ONNX Runtime's Python interface, has no bf16: such inputs and outputs are fp32 at the session's border.
    `types` replaces TensorProto types (see `retype`); by default none for ONNX Runtime on CUDA (`for_gpu`), and all
    half-precision types by fp32 on the CPU.

    Raises ModelLoadError: the file or its external weights cannot be read, or the disk is full.
    """
    with open_onnx(path) as opened:
        model = opened.model
        require_no_engine(model, path)
        halves = half_types(model)
        names = " and ".join(name for number, name in HALF_TYPES.items() if number in halves)
        found = frozenset(HALF_TYPES[number] for number in halves)
        to: Mapping[int, int] = types if types is not None else {} if for_gpu else UPCAST
        border = _border(model, for_gpu=for_gpu)
        if not halves & to.keys() and not (for_gpu and border):
            yield PreparedModel(source=str(path), precision=names or "fp32", halves=found)
            return
        if opened.data_files:
            take_in(model, path)  # bytes have no folder to resolve paths against
        precision = f"fp32 (the {names} model, upcast)" if to == UPCAST else names
        with _room_for_weights(opened) as folder:
            _settle_weights(opened, folder, to)
            with _must_be_sound(path):
                retype(model, to)
                given_names = set_border(model, border)
            source = _saved(model, folder, path)
            yield PreparedModel(source=source, precision=precision, given_names=given_names, halves=found)


@contextmanager
def _must_be_sound(path: Path) -> Iterator[None]:
    """Report malformed weights (wrong size, no type, segments), which have not been checked before."""
    try:
        yield
    except (ValueError, TypeError, KeyError, onnx.checker.ValidationError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ModelLoadError(f"{path}: is not a sound ONNX model ({reason}); export it again") from error


@contextmanager
def _room_for_weights(opened: OnnxFile) -> Iterator[Path | None]:
    """Yield a temporary folder for large weights; None without large weights."""
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


def _settle_weights(opened: OnnxFile, folder: Path | None, to: Mapping[int, int]) -> None:
    if folder is None:
        opened.take_in()
        return
    with _disk_may_be_full(folder, opened.path):
        move_weights(opened, folder / "weights.bin", to)


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
    """Return the types that inputs and outputs have at the session's border, if they differ from the types inside."""
    types = {value.name: value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)}
    if for_gpu:
        return {name: TensorProto.FLOAT for name, number in types.items() if number == TensorProto.BFLOAT16}
    return {name: number for name, number in types.items() if number == TensorProto.FLOAT16}


def set_border(model: ModelProto, types: Mapping[str, int]) -> dict[str, str]:
    """Change the types of inputs and outputs by casts that the runtime computes, in place; inner names and types stay.

    ONNX Runtime converts fp16 with processor instructions, NumPy element by element: 12 and 198 us for an image of 3x224x224.
    `types` has the TensorProto type at the border by name. Returns the new name of every input whose type differed.
    """
    graph = model.graph
    weights = {tensor.name for tensor in graph.initializer}  # IR 3 lists initializers among the inputs
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
    """Return the approximate bytes of the weights that `move_weights` would move, before the upcast."""
    return sum(weight.ByteSize() if place is None else place.length for weight, place in opened.large_weights())


def move_weights(opened: OnnxFile, file: Path, to: Mapping[int, int]) -> None:
    """Move large weights to a file, and replace them in the model by references; the model must be saved beside the file.

    `to` has the TensorProto types to write, by the types that they replace. Raises OSError: the file cannot be written;
    ModelLoadError: the model's file cannot be read, or a weight has an impossible size.
    """
    with file.open("wb") as output:
        for tensor, place in opened.large_weights():
            offset = -(-output.tell() // ALIGNMENT) * ALIGNMENT
            output.seek(offset)
            moved = TensorProto(name=tensor.name, dims=tensor.dims, data_type=tensor.data_type)
            if tensor.data_type in to:
                moved.data_type = to[tensor.data_type]
                _write_retyped(opened, tensor, place, output, moved.data_type)
            else:
                for piece in opened.pieces(tensor, place):
                    output.write(piece)
            moved.data_location = TensorProto.EXTERNAL
            for key, value in (("location", file.name), ("offset", offset), ("length", output.tell() - offset)):
                moved.external_data.add(key=key, value=str(value))
            tensor.CopyFrom(moved)
    opened.require_unchanged()


def _write_retyped(opened: OnnxFile, tensor: TensorProto, place: ByteRange | None, output: BinaryIO, data_type: int) -> None:
    """Write a weight of a half-precision type in another type."""
    dtype: np.dtype[Any] = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    wanted: np.dtype[Any] = helper.tensor_dtype_to_np_dtype(data_type)
    for piece in opened.pieces(tensor, place):
        if len(piece) % HALF_BYTES:
            raise ModelLoadError(f"{opened.path}: weight {tensor.name!r} ends in the middle of a number; export it again")
        output.write(np.frombuffer(piece, dtype).astype(wanted).view(np.uint8).data)
