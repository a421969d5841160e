"""Model repositories in object storage, as a writer of versions sees them.

A version is written on this disk first, in a folder that looks like the repository, and then put object by object: its
certificate, which claims the number; its other files; the model's configuration and labels, if they are new; and last its model
file, which makes it visible. Readers take a version folder without a model file for none.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from halfserve.export.export_errors import ExportError, telling_place
from halfserve.export.onnx_files.model_file import LARGE_BYTES
from halfserve.export.repository.version_files import CONFIG, LABELS, MODEL
from halfserve.export.repository.version_writer import require_name
from halfserve.files.object_storage import ObjectExistsError, ObjectStore, StorageError
from halfserve.files.onnx_outline import DamagedFileError, without_large_tensors
from halfserve.protos.certificates import CERTIFICATE


class StoredRepository:
    """A model repository at a URL.

    Attributes:
        url: The URL without credentials.
    """

    def __init__(self, url: str) -> None:
        """Open the store, without asking it anything.

        Raises:
            ExportError: The URL is not valid, or the package that opens it is not installed.
        """
        with _reporting():
            self._store = ObjectStore(url)
        self.url = self._store.url

    @contextmanager
    def likeness(self, name: str) -> Iterator[Path]:
        """Yield a temporary folder with the model's version numbers, configuration and labels, and without its versions' files.

        Errors name the URL in place of the folder.

        Raises:
            ExportError: The name is not valid, or the store cannot be read.
        """
        require_name(name)
        hidden = tempfile.TemporaryDirectory(prefix="halfserve-export-", ignore_cleanup_errors=True)
        with hidden as made, telling_place(Path(made), self.url):
            folder = Path(made) / name
            for path in self._paths(name):
                first, _, rest = path.partition("/")
                if rest and _is_number(first):
                    (folder / first).mkdir(parents=True, exist_ok=True)
                elif path in {CONFIG, LABELS}:
                    folder.mkdir(exist_ok=True)
                    with _reporting():
                        (folder / path).write_bytes(self._store.read(f"{name}/{path}"))
            yield Path(made)

    def latest(self, name: str) -> onnx.ModelProto | None:
        """Return the newest readable version without its weights, of which nothing is read; None where there is none.

        Raises:
            ExportError: The store cannot be read.
        """
        found = [path.split("/")[0] for path in self._paths(name) if path.endswith(f"/{MODEL}") and path.count("/") == 1]
        for number in sorted((int(first) for first in found if _is_number(first)), reverse=True):
            path = f"{name}/{number}/{MODEL}"
            with _reporting(), self._store.opened(path) as file:
                size = file.seek(0, 2)
                file.seek(0)
                with suppress(DamagedFileError, DecodeError, ValueError):
                    return onnx.load_from_string(without_large_tensors(file, size, MODEL, large_bytes=LARGE_BYTES))
        return None

    def publish(self, version: Path) -> str | None:
        """Put a version that was written to a likeness, so that readers see all of it or nothing.

        Returns:
            The version's URL; None where another writer took the number first.

        Raises:
            ExportError: The store cannot be written to; what was put is removed, unless that fails too.
        """
        folder, name = version.parent, version.parent.name
        files = sorted(path for path in version.rglob("*") if path.is_file())
        order = [version / CERTIFICATE, *(path for path in files if path not in {version / CERTIFICATE, version / MODEL})]
        put: list[str] = []
        try:
            for path in order:
                self._put(path, f"{name}/{path.relative_to(folder).as_posix()}", put, new=path.name == CERTIFICATE)
            present = self._paths(name)
            for path in (folder / LABELS, folder / CONFIG):
                if path.is_file() and path.name not in present:
                    self._put(path, f"{name}/{path.name}", put, new=True)
            self._put(version / MODEL, f"{name}/{version.name}/{MODEL}", put, new=True)
        except BaseException as error:
            for path_put in reversed(put):
                with suppress(StorageError):
                    self._store.remove(path_put)
            if isinstance(error, ObjectExistsError):
                return None
            if isinstance(error, StorageError):
                raise ExportError(str(error)) from error
            raise
        return f"{self.url}/{name}/{version.name}"

    def _put(self, source: Path, path: str, put: list[str], *, new: bool) -> None:
        self._store.put(source, path, new=new)
        put.append(path)

    def _paths(self, name: str) -> list[str]:
        """Paths of the model's objects, below its folder; none where it does not exist."""
        with _reporting():
            return self._store.paths_below(name)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


@contextmanager
def _reporting() -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        raise ExportError(str(error)) from error
