"""Models as they come: an ONNX message, its bytes, or a path to them; however large, they open at once."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import onnx
import onnx_ir
from google.protobuf.message import DecodeError, EncodeError

from export.errors import ExportError
from export.files.external_data import data_files, external_tensors, location_of, stored_at, take_in
from export.files.file_tensors import map_tensors
from export.files.file_window import FileWindow
from export.files.large_tensors import LARGE_BYTES, DamagedFileError, without_large_tensors
from export.files.model_checks import HEAD_BYTES, no_model, require_sound
from export.files.sparse_weights import densify

ModelSource: TypeAlias = onnx.ModelProto | bytes | Path | str

PROTOBUF_LIMIT_BYTES = 2**31 - 1


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelFile:
    """An ONNX model that was opened and found sound. Large tensors of a file are not read before they are asked for.

    Attributes:
        name: What errors call it.
        path: The file, absolute; None for a model in memory.
        outline: The model without the large tensors of a file, which it refers to as external data. Not to be changed.
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
        """For every initializer or other tensor in a data file, by name: the number of that file in `locations`."""
        numbers = {location: number for number, location in enumerate(self.locations)}
        places = ((tensor.name, numbers.get(location_of(tensor))) for tensor in external_tensors(self.outline))
        return {name: number for name, number in places if number is not None}

    @cached_property
    def size_bytes(self) -> int:
        """Size of the file, and of its data files, in bytes."""
        if self.path is None:
            return len(self.content)
        return sum(file.stat().st_size for file in (self.path, *self.data_files))

    @cached_property
    def sha256(self) -> str:
        """SHA-256 in hexadecimal: of the file's bytes, as `sha256sum` gives it.

        With data files it is the hash of the lines that `sha256sum` prints for the model file (called `model`) and for its data
        files, sorted by location, so that it covers all bytes and does not depend on the model file's own name.
        """
        if self.path is None:
            return hashlib.sha256(self.content).hexdigest()
        if not self.locations:
            return _sha256_of(self.path)
        lines = [f"{_sha256_of(self.path)}  model\n"]
        lines += [f"{_sha256_of(self._folder / location)}  {location}\n" for location in sorted(self.locations)]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

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
        """A fresh `onnx_ir.Model`, with dense weights only; what it does leaves this one as it is.

        Tensors that lie in files are `FileTensor`s with absolute paths, mapped one by one as they are read.

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
    """Open a model and check it, without reading the large tensors of a file.

    Args:
        source: A message, the bytes of one, or a path.
        large_bytes: Size from which a tensor of a file is left in it.

    Raises:
        ExportError: It is missing, unreadable, no ONNX model, damaged, too new, or its data files are not all there.
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


def load_model(source: ModelSource) -> tuple[onnx.ModelProto, bytes]:
    """The model as a message with all its tensors, and as bytes in one piece.

    Use `open_model` for what may be large, or where a hash of the file is wanted: data files are taken into these bytes.

    Raises:
        ExportError: As `open_model`; or the model is over 2 GiB.
    """
    opened = open_model(source)
    return opened.proto, opened.content


def serialize(model: onnx.ModelProto) -> bytes:
    """The model's bytes, the same ones for equal models.

    Raises:
        ExportError: It is over 2 GiB.
    """
    try:
        return model.SerializeToString(deterministic=True)
    except (EncodeError, ValueError) as error:
        raise ExportError("the model is over 2 GiB, more than one ONNX message holds: write it with external data") from error


def _outline(path: Path, name: str, large_bytes: int) -> onnx.ModelProto:
    try:
        if path.is_fifo():  # opening it would wait for a writer
            raise ExportError(f"cannot read the model {name}: it is a pipe; expected a file")
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
            if not head:
                raise ExportError(f"{name} is not an ONNX model or is damaged: it is empty")
            outline = without_large_tensors(FileWindow(file), path, large_bytes=large_bytes)
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
