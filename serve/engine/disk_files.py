"""Files of a model repository: opens regular files only, detects changes since the load, and removes temporary folders."""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import Any, TypeAlias, TypeVar
from weakref import WeakSet

from halfserve.files.onnx_outline import DamagedFileError
from halfserve.protos.certificates import CERTIFICATE, MAX_CERTIFICATE_BYTES, SCHEMA, certificate_inside
from halfserve.serve.engine.errors import ModelLoadError

if sys.platform == "win32":
    FLAGS = os.O_RDONLY | os.O_BINARY
else:
    FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY


KINDS = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
T = TypeVar("T")


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading, buffered, and without blocking.

    Opening a named pipe waits for its other end, and reading a device may wait or have effects, so that such a file in the
    repository would stop every reload.

    Raises:
        OSError: the file is not regular, or cannot be opened; `strerror` gives the reason.
    """
    _require_regular(path, path.stat())  # checked before opening, because opening a device may have effects
    descriptor = os.open(path, FLAGS)
    try:
        _require_regular(path, os.fstat(descriptor))  # checked again, because the file may have been replaced
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path) -> bytes:
    """Read the whole of a regular file.

    Raises:
        OSError: see `open_regular`.
    """
    with open_regular(path) as file:
        return file.read()


@dataclass(frozen=True)
class CertificateFile:
    """A certificate as it lies on the disk."""

    path: Path  # file that holds it: the model's own, or one beside it
    content: bytes  # JSON
    is_inside: bool  # whether the model's own file holds it

    def __str__(self) -> str:
        return f"the certificate inside {self.path}" if self.is_inside else str(self.path)

    def parsed(self) -> dict[str, Any]:
        """Return the content.

        Raises:
            ModelLoadError: it is not JSON, or not of a certificate.
        """
        try:
            content = json.loads(self.content)
        except (ValueError, RecursionError):
            raise ModelLoadError(f"{self}: cannot be read: it is no JSON; export the model again, or remove the file") from None
        if not isinstance(content, dict) or content.get("schema") != SCHEMA:
            raise self.not_ours()
        return content

    def not_ours(self) -> ModelLoadError:
        """Return the error for a file of another form than halfserve writes."""
        return ModelLoadError(f"{self}: is no certificate that halfserve wrote; remove it, or export the model again")


def find_certificate(model: Path) -> CertificateFile | None:
    """Read the certificate of a model, as `read_certificate` does.

    Raises:
        ModelLoadError: a file cannot be read, or the certificate is too large.
    """
    try:
        return read_certificate(model)
    except OSError as error:  # an error of the system or the disk, not of the certificate
        raise ModelLoadError(f"{error.filename or model}: cannot be read: {error.strerror}") from None


def read_certificate(model: Path) -> CertificateFile | None:
    """Read the certificate that a model file contains, or else that lies beside it; None if there is none.

    Raises:
        OSError: a file cannot be read, or the certificate is too large; `strerror` gives the reason, `filename` the file.
    """
    inside = _inside(model) if model.suffix == ".onnx" else None
    if inside is not None:
        return CertificateFile(model, inside, is_inside=True)
    path = model.parent / CERTIFICATE
    if not path.exists():
        return None
    with _naming(path), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_CERTIFICATE_BYTES:
            raise OSError(errno.EFBIG, f"it has {size} bytes, expected a certificate of at most {MAX_CERTIFICATE_BYTES}")
        return CertificateFile(path, file.read(), is_inside=False)


def _inside(model: Path) -> bytes | None:
    with _naming(model), open_regular(model) as file:
        try:
            return certificate_inside(file, os.fstat(file.fileno()).st_size)
        except DamagedFileError:  # loading the model reports it
            return None


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Give the file's name to errors of the system; those of reads have none."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def read_regular_text(path: Path, encoding: str = "utf-8") -> str:
    """Read a regular text file; all line ends become newlines.

    Raises:
        OSError: see `open_regular`.
        UnicodeDecodeError: the file is not text in this encoding.
    """
    with TextIOWrapper(open_regular(path), encoding=encoding) as file:
        return file.read()


def require_regular(path: Path) -> None:
    """Check that a path may be opened by other code; a missing file passes.

    Raises:
        OSError: the file is not regular, or cannot be examined.
    """
    try:
        _require_regular(path, path.stat())
    except FileNotFoundError:
        return


def _require_regular(path: Path, status: os.stat_result) -> None:
    if stat.S_ISREG(status.st_mode):
        return
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    kind = KINDS.get(stat.S_IFMT(status.st_mode), "something else")
    raise OSError(errno.EINVAL, f"it is {kind}, expected a regular file", str(path))


Stamp: TypeAlias = tuple[int, int]  # modification time in nanoseconds, and size in bytes


@dataclass(frozen=True)
class UnchangedFiles:
    """Detects changes since the load: of a model file, of data files whose names begin with its name, and of further files."""

    _stamps: Mapping[Path, Stamp]

    @classmethod
    def look(cls, model: Path) -> UnchangedFiles:
        """Remember the present state of the files; unreadable ones are reported by the code that reads them."""
        try:
            beside = [path for path in model.parent.iterdir() if path.name.startswith(model.name)]
        except OSError:
            beside = []
        return cls(_stamps_of(beside))

    def also(self, paths: Iterable[Path]) -> UnchangedFiles:
        """Remember the present state of further files."""
        return UnchangedFiles({**_stamps_of(paths), **self._stamps})

    def require(self) -> None:
        """Check that no file has changed. A missing one is reported by the code that reads it.

        Raises:
            ModelLoadError: a file has changed.
        """
        for path, before in self._stamps.items():
            if _stamp(path) not in {before, None}:
                raise ModelLoadError(
                    f"{path}: has been changed since the model was loaded; put the file back, or load the model again to serve "
                    "what is there now"
                )

    def guarded(self, read: Callable[..., T]) -> Callable[..., T]:
        """Return `read` with a check before each call."""

        def checked(*arguments: object) -> T:
            self.require()
            return read(*arguments)

        return checked


def _stamps_of(paths: Iterable[Path]) -> dict[Path, Stamp]:
    return {path: stamp for path in paths if (stamp := _stamp(path)) is not None}


def _stamp(path: Path) -> Stamp | None:
    try:
        status = path.stat()
    except (OSError, ValueError):  # ValueError: the path is not a valid file name
        return None
    return status.st_mtime_ns, status.st_size


_folders: WeakSet[tempfile.TemporaryDirectory[str]] = WeakSet()


def temporary_folder(prefix: str) -> tempfile.TemporaryDirectory[str]:
    """Make a folder, which the caller removes; `remove_temporary_folders` does so too.

    Raises:
        OSError: the folder cannot be made.
    """
    folder = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
    _folders.add(folder)
    return folder


def remove_temporary_folders() -> None:
    """Remove all temporary folders, because the process is about to end while threads may still use some."""
    for folder in list(_folders):
        folder.cleanup()
