"""Turns an ONNX file into the model that a runtime opens: unchanged on CUDA; upcast to fp32, or from fp16 to bf16, on the CPU.

Large weights move to a file that the runtime maps. In the message they would be copied three times, with Python's lock held,
and messages end at 2 GiB. From file to file, each piece is read, converted and written without the lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, helper, numpy_helper

from halfserve.files.onnx_outline import ByteRange
from halfserve.files.onnx_tensors import all_tensors
from halfserve.serve.backends.onnx_runtime.onnx_file import OnnxFile, nodes_below, open_onnx, require_no_engine, take_in
from halfserve.serve.engine.disk_files import temporary_folder
from halfserve.serve.engine.errors import ModelLoadError

FP32 = TensorProto.FLOAT
HALF_TYPES: Mapping[int, str] = {TensorProto.FLOAT16: "fp16", TensorProto.BFLOAT16: "bf16"}
# Replacements of types, by the type in the file. ONNX Runtime has few CPU kernels in fp16, fewer in bf16, and surrounds other
# operators with casts: computing in fp32 throughout is as fast as an fp32 model, and more accurate.
UPCAST: Mapping[int, int] = dict.fromkeys(HALF_TYPES, FP32)
FP16_AS_BF16: Mapping[int, int] = {TensorProto.FLOAT16: TensorProto.BFLOAT16}
BF16_AS_FP16: Mapping[int, int] = {TensorProto.BFLOAT16: TensorProto.FLOAT16}
# Attributes that hold a type, of all operators of ONNX and of ONNX Runtime's own domain.
TYPE_ATTRIBUTES = frozenset({"to", "dtype", "output_dtype", "precision", "softmax_precision", "output_datatype"})


def half_types(model: ModelProto) -> frozenset[int]:
    """Return the half-precision types of weights, inputs, outputs or casts."""
    return frozenset(number for number in _types(model) if number in HALF_TYPES)


def retype(model: ModelProto, to: Mapping[int, int]) -> None:
    """Change types in place, in weights, constants, casts, inputs, outputs, subgraphs and functions.

    `to` has the new TensorProto types, by the types that they replace. The model may be without its weights.
    """
    for tensor in all_tensors(model):
        _retype_tensor(tensor, to)
    for graph in _graphs(model):
        for value in (*graph.input, *graph.output, *graph.value_info):
            _retype_type(value.type, to)
    types = TypeAttributes(model.functions)
    for function in model.functions:
        for value in function.value_info:
            _retype_type(value.type, to)
        for default in function.attribute_proto:
            _retype_attribute(default, types.of_calls(function), to)
    for node in _nodes(model):
        for attribute in node.attribute:
            _retype_attribute(attribute, types.of(node), to)


def _types(model: ModelProto) -> Iterator[int]:
    yield from (tensor.data_type for tensor in all_tensors(model))
    for graph in _graphs(model):
        yield from (v.type.tensor_type.elem_type for v in (*graph.input, *graph.output))
    types = TypeAttributes(model.functions)
    for function in model.functions:
        for default in function.attribute_proto:
            if default.name in types.of_calls(function):
                yield default.i
    for node in _nodes(model):
        yield from (attribute.i for attribute in node.attribute if attribute.name in types.of(node))


def _graphs(model: ModelProto) -> Iterator[GraphProto]:
    yield model.graph
    for node in _nodes(model):
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield attribute.g
            yield from attribute.graphs


def _nodes(model: ModelProto) -> Iterator[NodeProto]:
    return nodes_below(model.graph.node, *(function.node for function in model.functions))


def _retype_attribute(attribute: AttributeProto, types: AbstractSet[str], to: Mapping[int, int]) -> None:
    # No operator of ONNX or ONNX Runtime has an attribute with a list of types.
    if attribute.name in types and attribute.i in to:
        attribute.i = to[attribute.i]
    if attribute.HasField("tp"):
        _retype_type(attribute.tp, to)


def _retype_tensor(tensor: TensorProto, to: Mapping[int, int]) -> None:
    if tensor.data_type in to:
        array = numpy_helper.to_array(tensor).astype(helper.tensor_dtype_to_np_dtype(to[tensor.data_type]))
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def _retype_type(proto: TypeProto, to: Mapping[int, int]) -> None:
    kind = proto.WhichOneof("value")
    if kind in {"tensor_type", "sparse_tensor_type"}:
        tensor = getattr(proto, kind)
        tensor.elem_type = to.get(tensor.elem_type, tensor.elem_type)
    elif kind in {"sequence_type", "optional_type"}:
        _retype_type(getattr(proto, kind).elem_type, to)


class TypeAttributes:
    """The integer attributes that hold a tensor type, also where a model's functions pass them on under other names."""

    def __init__(self, functions: Sequence[FunctionProto]) -> None:
        """`functions`: all functions of the model, which may call each other."""
        self._by_function: dict[tuple[str, str, str], AbstractSet[str]] = {
            _key(function): frozenset() for function in functions
        }
        grows = True
        while grows:
            grows = False
            for function in functions:
                found = self._handed_on(function)
                grows |= found != self._by_function[_key(function)]
                self._by_function[_key(function)] = found

    def of_calls(self, function: FunctionProto) -> AbstractSet[str]:
        return self._by_function[_key(function)]

    def of(self, node: NodeProto) -> AbstractSet[str]:
        """Return the names of the type attributes that a node may have."""
        return self._by_function.get((node.domain, node.op_type, node.overload), TYPE_ATTRIBUTES)

    def _handed_on(self, function: FunctionProto) -> AbstractSet[str]:
        attributes = ((attribute, self.of(node)) for node in nodes_below(function.node) for attribute in node.attribute)
        return {
            attribute.ref_attr_name for attribute, types in attributes if attribute.ref_attr_name and attribute.name in types
        }


def _key(function: FunctionProto) -> tuple[str, str, str]:
    return function.domain, function.name, function.overload


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
    size = sum(weight.ByteSize() if place is None else place.length for weight, place in opened.large_weights())
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
    dtype: np.dtype[Any] = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    wanted: np.dtype[Any] = helper.tensor_dtype_to_np_dtype(data_type)
    for piece in opened.pieces(tensor, place):
        if len(piece) % HALF_BYTES:
            raise ModelLoadError(f"{opened.path}: weight {tensor.name!r} ends in the middle of a number; export it again")
        output.write(np.frombuffer(piece, dtype).astype(wanted).view(np.uint8).data)
