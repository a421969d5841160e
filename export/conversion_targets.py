"""Where a converted model goes: into a file of its own, or into a model repository."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from export.errors import ExportError, telling_place
from export.onnx_files.model_file import ModelFile, open_model
from export.onnx_files.model_writer import StagedModel, superseded_files
from export.onnx_fp16.convert import require_free
from export.repository.version_writer import require_addable, require_same_network, write_model_version

if TYPE_CHECKING:
    from export.certificate.certificate import Certificate


@dataclass(frozen=True, kw_only=True)
class Put:
    """What became of a model.

    Attributes:
        path: Its file, or the version's folder in a repository.
        superseded: Data files beside it that only the model before it used.
    """

    path: Path
    superseded: tuple[str, ...] = ()


class Target(Protocol):
    """Where a model goes."""

    @property
    def model_name(self) -> str:
        """What the certificate calls it."""

    def check(self, source: ModelFile) -> None:
        """Check, before any work is done, that a model made from `source` may go there.

        Raises:
            ExportError: It may not.
        """

    @contextmanager
    def file(self) -> Iterator[Path]:
        """The file that the model is staged for."""

    def put(self, source: ModelFile, staged: StagedModel, certificate: Certificate | None) -> Put:
        """Put a staged model there.

        Raises:
            ExportError: It cannot be written; then nothing has changed.
        """


@dataclass(frozen=True, kw_only=True)
class FileTarget:
    """A file, data files beside it.

    Attributes:
        path: The file.
        overwrite: Whether a model that is there already, the source itself included, may be replaced.
    """

    path: Path
    overwrite: bool = False

    @property
    def model_name(self) -> str:
        """See `Target`."""
        return self.path.stem

    def check(self, source: ModelFile) -> None:
        """See `Target`."""
        require_free(self.path, source, overwrite=self.overwrite)

    @contextmanager
    def file(self) -> Iterator[Path]:
        """See `Target`."""
        yield self.path

    def put(self, source: ModelFile, staged: StagedModel, certificate: Certificate | None) -> Put:  # noqa: ARG002  (see Target)
        """See `Target`."""
        try:
            superseded = superseded_files(open_model(staged.target), staged)
        except ExportError:  # there is no model yet
            superseded = ()
        staged.publish()
        return Put(path=staged.target, superseded=tuple(name for name in superseded if name not in source.locations))


@dataclass(frozen=True, kw_only=True)
class RepositoryTarget:
    """A version in a model repository. See `export.repository.version_writer.write_model_version`.

    Attributes:
        repository: The repository's folder; made if missing.
        name: The model's name.
        version: The version; the next free one by default.
        max_batch_size: Largest batch that the server may form; 0 for a model without a batch dimension.
        fp32_twin: Whether the float32 model goes along.
        default_name: Whether `name` is a default: another network of that name is then no model to add a version to.
    """

    repository: Path
    name: str
    version: int | None = None
    max_batch_size: int = 32
    fp32_twin: bool = False
    default_name: bool = False

    @property
    def model_name(self) -> str:
        """See `Target`."""
        return self.name

    def check(self, source: ModelFile) -> None:
        """See `Target`."""
        if self.default_name:
            require_same_network(self.repository, self.name, source)
        require_addable(self.repository, self.name, source, version=self.version, max_batch_size=self.max_batch_size)

    @contextmanager
    def file(self) -> Iterator[Path]:
        """See `Target`. It lies on the repository's disk, and a repository that is to be made is not made yet."""
        folder = self.repository.absolute()
        try:
            while not folder.is_dir():
                folder = folder.parent
            hidden = tempfile.TemporaryDirectory(prefix=f".{self.name}.", dir=folder, ignore_cleanup_errors=True)
        except OSError as error:
            raise ExportError(f"cannot write to the repository {self.repository}: {error.strerror or error}") from error
        with hidden as made, telling_place(Path(made), self.repository / self.name):
            yield Path(made) / "model.onnx"

    def put(self, source: ModelFile, staged: StagedModel, certificate: Certificate | None) -> Put:
        """See `Target`."""
        if certificate is None:
            raise ExportError("a version in a repository needs a certificate; verify the model")
        written = write_model_version(
            self.repository,
            self.name,
            open_model(staged.path),
            certificate,
            version=self.version,
            max_batch_size=self.max_batch_size,
            fp32_twin=source if self.fp32_twin else None,
        )
        return Put(path=written)
