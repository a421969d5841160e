"""Opening ONNX models from a message, from bytes or from a file, without reading the large tensors of a file."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TypeAlias

import numpy as np
import onnx
import onnx_ir
from google.protobuf.message import DecodeError, EncodeError
from onnx import numpy_helper

from halfserve.export.export_errors import ExportError
from halfserve.export.onnx_files.external_data import data_files, external_tensors, location_of, map_tensors, stored_at, take_in
from halfserve.export.onnx_files.model_checks import HEAD_BYTES, no_model, require_sound
from halfserve.export.onnx_files.proto_graphs import all_graphs, all_nodes
from halfserve.files.onnx_outline import DamagedFileError, without_large_tensors
from halfserve.files.onnx_tensors import all_tensors
from halfserve.protos.certificates import ModelDigests, model_digests

ModelSource: TypeAlias = onnx.ModelProto | bytes | Path | str

PROTOBUF_LIMIT_BYTES = 2**31 - 1
LARGE_BYTES = 1 << 16  # tensors of this size and above stay in their file


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelFile:
    """An ONNX model that was opened and checked; large tensors of a file are read at access.

    Attributes:
        name: The model, as errors call it.
        path: The file, absolute; None for a model in memory.
        outline: The model, with the large tensors of a file as external data. Not to be changed.
        locations: The data files that hold the model's external data, relative to its folder, in order of first mention.
    """

    name: str
    path: Path | None
    outline: onnx.ModelProto
    locations: tuple[str, ...] = ()

    @property
    def data_files(self) -> tuple[Path, ...]:
        """Paths of the data files."""
        return tuple(self._folder / location for location in self.locations)

    @cached_property
    def shards(self) -> dict[str, int]:
        """The index in `locations` of the data file of each tensor, by the tensor's name."""
        numbers = {location: number for number, location in enumerate(self.locations)}
        places = ((tensor.name, numbers.get(location_of(tensor))) for tensor in external_tensors(self.outline))
        return {name: number for name, number in places if number is not None}

    @cached_property
    def size_bytes(self) -> int:
        """Size of the file and its data files, in bytes."""
        if self.path is None:
            return len(self.content)
        return sum(file.stat().st_size for file in (self.path, *self.data_files))

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the file's bytes and its data files, in hexadecimal (see `ModelDigests.with_data_files`)."""
        return self.digests.file

    @cached_property
    def digests(self) -> ModelDigests:
        """Hashes of the file and its data files."""
        return self.own_digests.with_data_files(self.data_digests)

    @cached_property
    def own_digests(self) -> ModelDigests:
        """Hashes of the file alone."""
        if self.path is None:
            return model_digests(io.BytesIO(self.content), len(self.content))
        try:
            with self.path.open("rb") as file:
                return model_digests(file, os.fstat(file.fileno()).st_size)
        except OSError as error:
            raise _unreadable(str(self.path), error) from error

    @cached_property
    def data_digests(self) -> dict[str, str]:
        """SHA-256 of each data file in hexadecimal, by location."""
        return {location: _sha256_of(self._folder / location) for location in self.locations}

    @cached_property
    def content(self) -> bytes:
        """The model in one piece, as bytes: the file's own where it has no data files.

        Raises:
            ExportError: It is over 2 GiB, more than one ONNX message holds.
        """
        if self.path is None or self.locations:
            return serialize(self.proto)
        self._require_one_message()
        return _read(self.path)

    @cached_property
    def proto(self) -> onnx.ModelProto:
        """The model as one message with all its tensors.

        Raises:
            ExportError: It is over 2 GiB, more than one ONNX message holds.
        """
        if self.path is None:
            return self.outline
        self._require_one_message()
        if not self.locations:
            return onnx.load_from_string(self.content)
        whole = onnx.ModelProto()
        whole.CopyFrom(self.outline)
        for tensor in list(external_tensors(whole)):
            take_in(tensor, self._folder, self.name)
        return whole

    def to_ir(self) -> onnx_ir.Model:
        """Return a new `onnx_ir.Model` with dense weights only, whose changes do not affect this one.

        Tensors in files are `FileTensor`s with absolute paths, mapped at access.

        Raises:
            ExportError: A sparse weight cannot be made dense.
        """
        copied = onnx.ModelProto()
        copied.CopyFrom(self.outline)
        densify(copied)
        model = onnx_ir.from_proto(copied)
        if self.path is not None:
            map_tensors(model, self._folder)
        return model

    @property
    def _folder(self) -> Path:
        return self.path.parent if self.path is not None else Path()

    def _require_one_message(self) -> None:
        if self.size_bytes > PROTOBUF_LIMIT_BYTES:
            raise ExportError(
                f"{self.name} takes {self.size_bytes / 2**30:.1f} GiB; at most 2 GiB fit in one message: give it as a path"
            )


def open_model(source: ModelSource, *, large_bytes: int = LARGE_BYTES) -> ModelFile:
    """Open a message, the bytes of one, or a file, and check it; tensors of a file from `large_bytes` on are left in it.

    Raises:
        ExportError: The model is missing, unreadable, no ONNX model, damaged or too new, or lacks data files.
    """
    if isinstance(source, onnx.ModelProto | bytes):
        outline = source if isinstance(source, onnx.ModelProto) else _parsed(source, source[:HEAD_BYTES], "the model")
        require_sound(outline, "the model")
        if locations := data_files(outline):
            raise ExportError(f"the model keeps weights in {locations[0]!r}; give it as a path, so that the file can be found")
        return ModelFile(name="the model", path=None, outline=outline)
    path, name = Path(source).absolute(), str(source)
    outline = _outline(path, name, large_bytes)
    require_sound(outline, name)
    embedded, folder = str(path), path.parent
    for tensor in external_tensors(outline):
        if location_of(tensor) != embedded:
            stored_at(tensor, folder, name)
    locations = tuple(location for location in data_files(outline) if location != embedded)
    return ModelFile(name=name, path=path, outline=outline, locations=locations)


def serialize(model: onnx.ModelProto) -> bytes:
    """Return the model's bytes; equal models give equal bytes.

    Raises:
        ExportError: It is over 2 GiB.
    """
    try:
        return model.SerializeToString(deterministic=True)
    except (EncodeError, ValueError) as error:
        raise ExportError("the model is over 2 GiB, more than one ONNX message holds: write it with external data") from error


def _outline(path: Path, name: str, large_bytes: int) -> onnx.ModelProto:
    try:
        if path.is_fifo():  # opening it would block
            raise ExportError(f"cannot read the model {name}: it is a pipe; expected a file")
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
            if not head:
                raise ExportError(f"{name} is not an ONNX model or is damaged: it is empty")
            size = os.fstat(file.fileno()).st_size
            outline = without_large_tensors(file, size, str(path), large_bytes=large_bytes)
    except OSError as error:
        raise _unreadable(name, error) from error
    except DamagedFileError as error:
        raise no_model(name, head, str(error)) from error
    return _parsed(outline, head, name)


def _parsed(content: bytes, head: bytes, name: str) -> onnx.ModelProto:
    try:
        return onnx.load_from_string(content)
    except (DecodeError, ValueError) as error:
        raise no_model(name, head) from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(str(path), error) from error


def _unreadable(name: str, error: OSError) -> ExportError:
    hint = "; give the .onnx file in it" if isinstance(error, IsADirectoryError) else ""
    return ExportError(f"cannot read the model {name}: {error.strerror or error}{hint}")


def _sha256_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _unreadable(str(path), error) from error


def densify(model: onnx.ModelProto) -> None:
    """Write sparse initializers and sparse constants as dense ones, in place.

    ONNX's own inference has no operator that takes a sparse tensor, and ONNX Runtime makes them dense when it loads a model.

    Raises:
        ExportError: A sparse tensor's indices do not fit its shape, or its numbers lie in a data file.
    """
    for graph in all_graphs(model):
        graph.initializer.extend(_dense(sparse) for sparse in graph.sparse_initializer)
        del graph.sparse_initializer[:]
    for node in all_nodes(model):
        _densify_attributes(node.attribute)


def _densify_attributes(attributes: Iterable[onnx.AttributeProto]) -> None:
    for attribute in attributes:
        if attribute.type == onnx.AttributeProto.SPARSE_TENSOR and attribute.name == "sparse_value":
            dense = _dense(attribute.sparse_tensor)
            attribute.Clear()
            attribute.name, attribute.type = "value", onnx.AttributeProto.TENSOR
            attribute.t.CopyFrom(dense)


def _dense(sparse: onnx.SparseTensorProto) -> onnx.TensorProto:
    if any(part.data_location == onnx.TensorProto.EXTERNAL for part in (sparse.values, sparse.indices)):
        raise ExportError(
            f"sparse tensor {sparse.values.name!r} lies in a data file, expected it in the model: save the model in one file"
        )
    values, indices, shape = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices), tuple(sparse.dims)
    dense = np.zeros(shape, values.dtype)
    try:
        if indices.ndim == 1:
            dense.reshape(-1)[indices] = values
        else:
            dense[tuple(indices.T)] = values
    except (IndexError, ValueError) as error:
        raise ExportError(
            f"sparse tensor {sparse.values.name!r}: its indices do not fit shape {list(shape)}; export the model again"
        ) from error
    return numpy_helper.from_array(dense, sparse.values.name)


def format_opset(ir_version: int) -> int:
    """Return the newest version of ONNX's operators that was released with this IR version or an older one."""
    fitting = [opset for _, version, opset, *_ in onnx.helper.VERSION_TABLE if version <= ir_version]
    return max(fitting, default=onnx.defs.onnx_opset_version())


def growth(source: ModelFile, converted: ModelFile) -> str | None:
    """Explain why `converted` takes more bytes than `source`; None where it does not.

    The parts that grew and shrank follow, the largest growth first: "than its source by 900 bytes: 1,000 more in casts, 100
    fewer in weights".
    """
    more = converted.size_bytes - source.size_bytes
    if more <= 0:
        return None
    before, after = _parts(source), _parts(converted)
    changes = sorted(((after[part] - before[part], part) for part in after if after[part] != before[part]), reverse=True)
    texts = [f"{abs(change):,} {'more' if change > 0 else 'fewer'} in {part}" for change, part in changes]
    return f"than its source by {more:,} byte{'' if more == 1 else 's'}: {', '.join(texts)}"


def _parts(model: ModelFile) -> dict[str, int]:
    """Bytes by part of the files; together their size."""
    outline = model.outline
    parts = {
        "weights": sum(_tensor_bytes(tensor) for tensor in all_tensors(outline)),
        "casts": sum(node.ByteSize() for node in all_nodes(outline) if node.op_type == "Cast" and not node.domain),
        "metadata, with the conversion's settings and the certificate": sum(e.ByteSize() for e in outline.metadata_props),
    }
    return {**parts, "nodes and names": model.size_bytes - sum(parts.values())}


def _tensor_bytes(tensor: onnx.TensorProto) -> int:
    if tensor.data_type == onnx.TensorProto.STRING:
        return sum(len(text) for text in tensor.string_data)
    return prod(tensor.dims) * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
