"""An ONNX file that is open: its graph at hand, its large weights to be read piece by piece."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto

from serve.backends.onnx_runtime.external_data import data_files
from serve.backends.onnx_runtime.onnx_outline import LARGE_BYTES, Outline, Place, read_outline
from serve.engine.disk_files import open_regular
from serve.engine.errors import ModelLoadError

# Smaller files are parsed as a whole, which takes a millisecond: as long as to walk through a graph of a hundred nodes.
SMALL_FILE_BYTES = 1 << 22
PIECE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class OnnxFile:
    """A model, and the way to the weights that were left in its file.

    Attributes:
        path: of the file.
        model: see `Outline`.
        data_files: that its tensors lie in, seen from its folder, and all in that folder.
    """

    path: Path
    model: onnx.ModelProto
    data_files: frozenset[str]
    _left_out: Mapping[int, Place]
    _file: BinaryIO
    _stamp: tuple[int, int]

    def large_weights(self) -> list[tuple[TensorProto, Place | None]]:
        """Those that are worth a place in a file: each with its place in this one, or None where the message holds it."""
        weights = enumerate(self.model.graph.initializer)
        both = ((weight, self._left_out.get(index)) for index, weight in weights)
        return [(weight, place) for weight, place in both if place is not None or _is_large(weight)]

    def pieces(self, weight: TensorProto, place: Place | None) -> Iterator[bytes | memoryview]:
        """The bytes of a weight, as they are stored, in pieces of PIECE_BYTES and a rest.

        Raises:
            ModelLoadError: the file has become shorter, or cannot be read.
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
        """Make the message whole.

        Raises:
            ModelLoadError: the file has changed meanwhile, or cannot be read.
        """
        for weight, place in self.large_weights():
            if place is not None:
                weight.raw_data = self._read(place.offset, place.length)
        self.require_unchanged()

    def require_unchanged(self) -> None:
        """Check that what was read is all of one file.

        Raises:
            ModelLoadError: the file was written to since it was opened.
        """
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
    """Open an ONNX file and parse its graph. Weights that lie in files beside it stay there.

    Raises:
        ModelLoadError: the file cannot be read, is not ONNX, or keeps tensors elsewhere than in files of its folder.
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


def _outline(path: Path, file: BinaryIO, size: int) -> Outline:
    try:
        # Always as the runtime reads it, whatever the file is called: by some names onnx.load takes it for text.
        if size > SMALL_FILE_BYTES:
            outline = read_outline(file, size)
        else:
            outline = Outline(model=onnx.ModelProto.FromString(file.read()), left_out={})
    except (DecodeError, ValueError, OSError) as error:
        raise _unreadable(path, error) from None
    if not outline.model.HasField("graph") or not outline.model.opset_import:
        raise ModelLoadError(
            f"{path}: is not an ONNX model (no graph in it); expected what torch.onnx.export or onnx.save writes"
        )
    return outline


def _is_large(weight: TensorProto) -> bool:
    """Whether the message holds it and it is large. To ask for `raw_data` would copy it."""
    return weight.ByteSize() >= LARGE_BYTES and weight.HasField("raw_data")


def _stamp(file: BinaryIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def _unreadable(path: Path, error: Exception) -> ModelLoadError:
    if isinstance(error, OSError):  # of the system or the disk, which says nothing about the model
        return ModelLoadError(f"{path}: cannot be read: {error.strerror or error}")
    return ModelLoadError(f"{path}: is not a readable ONNX file ({str(error).splitlines()[0]}); export it again")


def _changed(path: Path) -> ModelLoadError:
    return ModelLoadError(
        f"{path}: was written to while it was read; load it again once it is complete, or rename it into place"
    )
