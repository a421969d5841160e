"""Detects the kind of a file by its first bytes, as names can be wrong and error messages must say what was given."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable
from enum import Enum
from pathlib import Path

_READ = 4096
_LONGEST_HEADER = 100_000_000  # most bytes of a safetensors file's header, as in its library


class WeightsError(ValueError):
    """A file of weights cannot be read, or does not fit its module; the text is one line and says what to do."""


class FileKind(Enum):
    """A kind of file; the value describes it in a few words."""

    TORCH_ARCHIVE = "a file that torch.save wrote"
    EXPORTED_PROGRAM = "a program that torch.export.save wrote"
    TORCHSCRIPT = "a TorchScript module"
    SAFETENSORS = "a safetensors file"
    PICKLE = "a pickle"
    ONNX = "an ONNX model"
    NUMPY = "a file of numpy arrays"
    LFS_POINTER = "a pointer of git LFS to the file, not the file itself"
    HTML = "a web page"
    GGUF = "a GGUF file"
    HDF5 = "an HDF5 or Keras file"
    ARCHIVE = "a compressed archive"
    EMPTY = "empty"
    TRUNCATED = "a damaged archive"
    UNKNOWN = "no file of a known kind"


def kind_of(path: Path) -> FileKind:
    """Detect the kind of the file.

    Raises:
        WeightsError: It cannot be read.
    """
    try:
        with path.open("rb") as file:
            start = file.read(_READ)
            size = path.stat().st_size
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror or error}") from error
    if start.startswith(b"PK\x03\x04"):
        return _kind_of_zip(path)
    found = (kind for kind, fits in _SIGNS.items() if fits(start, size))
    return next(found, FileKind.UNKNOWN)


def _starts(*magic: bytes) -> Callable[[bytes, int], bool]:
    return lambda start, _: start.startswith(magic)


def _is_safetensors(start: bytes, size: int) -> bool:
    """Return the length of a JSON object, and the object; a truncated file has a longer one."""
    return start[8:9] == b"{" and struct.unpack("<Q", start[:8])[0] < max(size, _LONGEST_HEADER)


def _is_onnx(start: bytes, _: int) -> bool:
    """ModelProto's first field, ir_version, is a small number; then comes a producer, a graph or an opset."""
    return start[:1] == b"\x08" and start[1:2] < b"\x20" and start[2:3] in (b"\x12", b"\x1a", b"\x3a", b"\x42")


_SIGNS: dict[FileKind, Callable[[bytes, int], bool]] = {
    FileKind.EMPTY: lambda start, _: not start,
    FileKind.LFS_POINTER: _starts(b"version https://git-lfs"),
    FileKind.GGUF: _starts(b"GGUF"),
    FileKind.HDF5: _starts(b"\x89HDF\r\n"),
    FileKind.NUMPY: _starts(b"\x93NUMPY"),
    FileKind.ARCHIVE: lambda start, _: (
        start.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"7z\xbc\xaf")) or start[257:262] == b"ustar"
    ),
    FileKind.PICKLE: _starts(b"\x80"),
    FileKind.HTML: lambda start, _: start.lstrip()[:9].lower().startswith((b"<!doctype", b"<html")),
    FileKind.SAFETENSORS: _is_safetensors,
    FileKind.ONNX: _is_onnx,
}


def _kind_of_zip(path: Path) -> FileKind:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError):
        return FileKind.TRUNCATED
    inner = {name.partition("/")[2] or name for name in names}
    is_script = "data.pkl" in inner and any(name.startswith("code/") for name in inner)
    signs = {
        FileKind.EXPORTED_PROGRAM: "archive_format" in inner,
        FileKind.TORCHSCRIPT: is_script,
        FileKind.TORCH_ARCHIVE: "data.pkl" in inner,
        FileKind.NUMPY: all(name.endswith(".npy") for name in names),
        FileKind.HDF5: "model.weights.h5" in names,
    }
    return next((kind for kind, found in signs.items() if found), FileKind.ARCHIVE)
