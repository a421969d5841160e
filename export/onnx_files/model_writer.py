"""Writing an `onnx_ir.Model` tensor by tensor, to one file or with data files, whole or not at all.

A model is first staged in a hidden folder beside its target, where it can be opened and verified, and then published by
renaming its files. The name of a data file holds a part of its hash: equal models give equal files, and a new model never
touches a data file that a reader of an older model may still need.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import BinaryIO, Literal, TypeAlias, TypeVar

import numpy as np
import onnx
import onnx_ir

from halfserve.export.export_errors import ExportError, telling_place
from halfserve.export.onnx_files.external_data import DetachedModel, detached
from halfserve.export.onnx_files.model_file import PROTOBUF_LIMIT_BYTES, ModelFile
from halfserve.files.atomic_files import PendingFile, sync_folder, synced
from halfserve.files.varint import length_delimited

ExternalData: TypeAlias = Literal["auto", "yes", "no"]

HASH_DIGITS = 12
PAGE_BYTES = 4096
PAGE_ALIGNED_FROM_BYTES = 1 << 20  # large weights are aligned so that a runtime can map them; padding then costs at most 0.4 %
ALIGNMENT_BYTES = 64  # a cache line
# Field numbers of onnx.proto.
MODEL_GRAPH, GRAPH_INITIALIZER, TENSOR_RAW_DATA = 7, 5, 9
_LAST_FIELD = 2**29
_Message = TypeVar("_Message", onnx.ModelProto, onnx.GraphProto, onnx.TensorProto)


@dataclass(frozen=True, kw_only=True)
class StagedModel:
    """A model that is written to a hidden folder, where it can be opened like any other, but not yet published to `target`."""

    path: Path
    target: Path
    data_files: tuple[Path, ...]

    def publish(self) -> None:
        """Move the files into place, the model file last, so that a reader finds the old model or the new one.

        Raises:
            ExportError: A file cannot be moved; then nothing has changed. Or the disk does not confirm the move; then the new
                model is in place, but may not survive a power cut.
        """
        folder, moved = self.target.parent, []
        try:
            for file in self.data_files:
                place = folder / file.name
                existed = place.exists()
                file.replace(place)
                if not existed:
                    moved.append(place)
            sync_folder(folder)
            self.path.replace(self.target)
            moved.clear()  # the new model is in place and needs them
            sync_folder(folder)
        except OSError as error:
            for file in moved:
                file.unlink(missing_ok=True)
            raise ExportError(f"cannot write {self.target}: {error.strerror or error}") from error


@contextmanager
def staged_model(
    model: onnx_ir.Model,
    target: Path | str,
    *,
    external_data: ExternalData = "auto",
    shards: Mapping[str, int] | None = None,
    limit_bytes: int = PROTOBUF_LIMIT_BYTES,
) -> Iterator[StagedModel]:
    """Write a model beside its target; on leaving, unpublished files are removed.

    At most one tensor at a time is in memory, beside the model's own tensors in memory.

    Args:
        model: The model; its tensors are read one by one, lazy ones evaluated and dropped.
        target: The path to publish to. Links are followed. Its folder must exist.
        external_data: "yes" puts the tensors into data files, "no" into the model file; "auto" into data files where the model
            came with such (`shards`) or where one file cannot hold it.
        shards: The number of an initializer's data file, from 0, by name; other initializers follow the one before them. None
            or empty: one data file.
        limit_bytes: The largest size of one file.

    Raises:
        ExportError: The folder is missing or cannot be written to, the disk is full, a tensor cannot be read, or the model is
            over 2 GiB and has to be one file.
    """
    target = Path(target).resolve()
    try:
        hidden = tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent, ignore_cleanup_errors=True)
    except OSError as error:
        raise ExportError(f"cannot write {target}: {error.strerror or error}: {target.parent}") from error
    with hidden as folder, telling_place(Path(folder), target.parent):
        try:
            with detached(model) as outline:
                staged = _staged(outline, Path(folder), target, external_data, shards or {}, limit_bytes)
        except OSError as error:
            raise ExportError(f"cannot write {target}: {error.strerror or error}") from error
        yield staged


def _staged(
    outline: DetachedModel, folder: Path, target: Path, external_data: ExternalData, shards: Mapping[str, int], limit_bytes: int
) -> StagedModel:
    path = folder / target.name
    external = external_data == "yes" or (external_data == "auto" and (bool(shards) or outline.size_bytes > limit_bytes))
    if external:
        data = _write_data_files(outline, folder, target, shards)
    elif outline.size_bytes > limit_bytes:
        raise ExportError(
            f"{target} would take {outline.size_bytes / 2**30:.1f} GiB, and one ONNX file holds at most "
            f"{limit_bytes / 2**30:.1f}; allow external data"
        )
    else:
        data = ()
    with synced(path) as file:
        if external:
            file.write(_limited(outline.proto, target, limit_bytes))
        else:
            write_in_one_file(file, outline)
    return StagedModel(path=path, target=target, data_files=data)


def _write_data_files(outline: DetachedModel, folder: Path, target: Path, shards: Mapping[str, int]) -> tuple[Path, ...]:
    shard_of = _shard_of_each([tensor.name or "" for tensor, _ in outline.tensors], shards)
    order = sorted(range(len(shard_of)), key=shard_of.__getitem__)  # stable: within a file, the model's order
    count = len(set(shard_of))
    written: list[Path] = []
    for number, (_, members) in enumerate(groupby(order, key=shard_of.__getitem__), start=1):
        unnamed = folder / f"{number}.tmp"
        chosen = [outline.tensors[index] for index in members]
        with synced(unnamed) as file:
            offsets = [write_padded(file, tensor) for tensor, _ in chosen]
        part = f"-{number:05}-of-{count:05}" if count > 1 else ""
        named = folder / f"{target.stem}{part}-{_digest(unnamed)}.data"
        unnamed.rename(named)
        written.append(named)
        for (tensor, proto), offset in zip(chosen, offsets, strict=True):
            _refer(proto, named.name, offset, tensor.nbytes)
    return tuple(dict.fromkeys(written))


def _shard_of_each(names: list[str], shards: Mapping[str, int]) -> list[int]:
    result, current = [], min(shards.values(), default=0)
    for name in names:
        current = shards.get(name, current)
        result.append(current)
    return result


def _refer(proto: onnx.TensorProto, location: str, offset: int, length: int) -> None:
    proto.data_location = onnx.TensorProto.EXTERNAL
    del proto.external_data[:]
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
        proto.external_data.add(key=key, value=value)


def _limited(proto: onnx.ModelProto, target: Path, limit_bytes: int) -> bytes:
    if proto.ByteSize() > limit_bytes:
        raise ExportError(f"{target} would take {proto.ByteSize() / 2**30:.1f} GiB even without its weights; split the model")
    return proto.SerializeToString(deterministic=True)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:HASH_DIGITS]


def superseded_files(old: ModelFile, new: StagedModel) -> tuple[str, ...]:
    """Return the data files of a replaced model that the new one does not use; they stay for readers of the old model."""
    kept = {file.name for file in new.data_files}
    return tuple(location for location in old.locations if location not in kept)


def write_padded(file: BinaryIO, tensor: onnx_ir.TensorProtocol) -> int:
    """Append a tensor's bytes, aligned so that a runtime can map them.

    Returns:
        The offset: a multiple of the page size for a large tensor, else of a cache line.
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
        ExportError: The tensor has another number of bytes than type and shape state.
    """
    start = file.tell()
    if isinstance(tensor, onnx_ir.ExternalTensor):
        tensor.tofile(file)  # copied within the kernel where that is possible
    elif tensor.dtype.bitwidth < 8 or isinstance(tensor, onnx_ir.serde.TensorProtoTensor):
        file.write(tensor.tobytes())
    else:
        array = np.ascontiguousarray(tensor.numpy())
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        file.write(little.reshape(-1).view(np.uint8).data)
    if file.tell() - start != tensor.nbytes:
        raise ExportError(f"tensor {tensor.name!r} has {file.tell() - start:,} bytes, its type and shape say {tensor.nbytes:,}")


def write_in_one_file(file: BinaryIO, outline: DetachedModel) -> None:
    """Write the model's message with all tensors, byte for byte as protobuf does, without holding it whole in memory.

    The initializers of the main graph are appended one by one; the few large ones of bodies become part of the message first.
    """
    main = {id(proto): tensor for tensor, proto in outline.tensors}
    initializers = list(outline.proto.graph.initializer)
    ours = {id(proto) for proto in initializers}
    for tensor, proto in outline.tensors:
        if id(proto) not in ours:
            proto.raw_data = tensor.tobytes()
    graph = outline.proto.graph
    before, after = _fields(graph, 0, GRAPH_INITIALIZER), _fields(graph, GRAPH_INITIALIZER, _LAST_FIELD)
    entries = [_InitializerField(proto, main.get(id(proto))) for proto in initializers]
    length = len(before) + sum(entry.size for entry in entries) + len(after)
    file.write(_fields(outline.proto, 0, MODEL_GRAPH) + length_delimited(MODEL_GRAPH, length) + before)
    for entry in entries:
        entry.write(file)
    file.write(after + _fields(outline.proto, MODEL_GRAPH, _LAST_FIELD))


class _InitializerField:
    """One initializer in a graph's message: its fields around its bytes."""

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
    """Return the fields of a message between two numbers, both excluded, as bytes."""
    part = type(message)()
    part.CopyFrom(message)
    for field, _ in message.ListFields():
        if not above < field.number < below:
            part.ClearField(field.name)
    return part.SerializeToString(deterministic=True)


def write_atomically(path: Path | str, content: bytes) -> None:
    """Write `content` to `path` as `halfserve.files.atomic_files.atomic_file` does.

    Raises:
        ExportError: The folder is missing or cannot be written to, or the disk is full.
    """
    with waiting_file(path, content) as put:
        put()


@contextmanager
def waiting_file(path: Path | str, content: bytes) -> Iterator[Callable[[], None]]:
    """Write `content` beside `path` now, which does everything that may fail but a rename; calling the result renames it.

    On leaving, a file that was not renamed is removed. Anything but a regular file is written to at once.

    Raises:
        ExportError: See `write_atomically`.
    """
    path = Path(path)
    with _naming(path):
        pending = PendingFile(path)
    try:
        with _naming(path):
            pending.file.write(content)
            pending.sync()

        def put() -> None:
            with _naming(path):
                pending.publish()

        yield put
    finally:
        pending.discard()


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ExportError(f"cannot write {path}: {error.strerror or error}") from error
