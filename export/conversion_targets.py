"""Targets of a conversion: a file, or a version in a model repository."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from halfserve.export.export_errors import ExportError, telling_place
from halfserve.export.onnx_files.model_file import ModelFile, open_model
from halfserve.export.onnx_files.model_writer import StagedModel, superseded_files
from halfserve.export.onnx_fp16.convert import require_free
from halfserve.export.repository.config_file import served_config
from halfserve.export.repository.version_writer import (
    CONFIG,
    bound_files,
    config_of_version,
    latest_version,
    require_addable,
    require_same_network,
    write_model_version,
)
from halfserve.export.tasks.task import Task
from halfserve.files.object_storage import is_url
from halfserve.protos.certificates import bound_settings

if TYPE_CHECKING:
    from halfserve.export.certificate.certificate import Certificate
    from halfserve.export.repository.stored_repository import StoredRepository
    from halfserve.export.verification.samples import Inputs


@dataclass(frozen=True, kw_only=True)
class PublishedModel:
    """A model that was written.

    Its path is the file, or the version's folder in a repository; relative to the URL, which is without credentials, for one in
    object storage. Superseded are data files beside it that only the model before it used.
    """

    path: Path
    superseded: tuple[str, ...] = ()
    url: str = ""


class ConversionTarget(Protocol):
    """A place to write a converted model to."""

    @property
    def model_name(self) -> str:
        """The model's name in the certificate."""
        ...

    @property
    def has_certificate_file(self) -> bool:
        """Whether the certificate is a file beside the model; otherwise the model's file contains it."""
        ...

    def check(self, source: ModelFile) -> None:
        """Check, before any work is done, that a model made from `source` may be written.

        Raises:
            ExportError: It may not.
        """

    @contextmanager
    def file(self) -> Iterator[Path]:
        """The file that the model is staged for."""
        ...

    def recorded(self, source: ModelFile, inputs: Inputs) -> bytes:
        """Samples to write beside the model, with their float32 answers (`recorded_samples`); empty for none."""
        ...

    def bound(self, certificate: Certificate, source: ModelFile, model: ModelFile, recorded: bytes) -> Certificate:
        """The certificate with the files and settings that the model, made from `source`, is written with.

        Raises:
            ExportError: They cannot be read.
        """
        ...

    def publish(
        self, source: ModelFile, staged: StagedModel, certificate: Certificate | None, recorded: bytes
    ) -> PublishedModel:
        """Publish a staged model.

        Raises:
            ExportError: It cannot be written; nothing has changed.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class FileTarget:
    """A file, with its data files beside it.

    Attributes:
        path: The file.
        overwrite: Whether an existing model, the source included, may be replaced.
    """

    path: Path
    overwrite: bool = False

    @property
    def model_name(self) -> str:
        return self.path.stem

    @property
    def has_certificate_file(self) -> bool:
        return False

    def check(self, source: ModelFile) -> None:
        require_free(self.path, source, overwrite=self.overwrite)

    @contextmanager
    def file(self) -> Iterator[Path]:
        yield self.path

    def recorded(self, source: ModelFile, inputs: Inputs) -> bytes:  # noqa: ARG002  (a file has none beside it)
        return b""

    def bound(
        self,
        certificate: Certificate,
        source: ModelFile,  # noqa: ARG002  (see below)
        model: ModelFile,  # noqa: ARG002  (see below)
        recorded: bytes,  # noqa: ARG002  (a file has neither files nor a configuration beside it)
    ) -> Certificate:
        return certificate

    def publish(
        self,
        source: ModelFile,
        staged: StagedModel,
        certificate: Certificate | None,  # noqa: ARG002  (the file contains it)
        recorded: bytes,  # noqa: ARG002  (a file has none beside it)
    ) -> PublishedModel:
        try:
            superseded = superseded_files(open_model(staged.target), staged)
        except ExportError:  # there is no earlier model
            superseded = ()
        staged.publish()
        return PublishedModel(path=staged.target, superseded=tuple(name for name in superseded if name not in source.locations))


@dataclass(frozen=True, kw_only=True)
class RepositoryTarget:
    """A version in a model repository; see `write_model_version`.

    Attributes:
        repository: The repository's folder, made if missing; or its URL in object storage.
        name: The model's name.
        version: The version; the next free one by default.
        max_batch_size: Largest batch that the server may form; 0 for a model without a batch dimension.
        fp32_twin: Whether the float32 model is written too.
        default_name: Whether `name` is a default: no version is then added to another network of that name.
        task: The model's task, whose labels and files are written too.
    """

    repository: Path | str
    name: str
    version: int | None = None
    max_batch_size: int = 32
    fp32_twin: bool = False
    default_name: bool = False
    task: Task | None = None

    @property
    def model_name(self) -> str:
        return self.name

    @property
    def has_certificate_file(self) -> bool:
        return True

    @cached_property
    def _stored(self) -> StoredRepository | None:
        """The repository in object storage; None for a folder."""
        if not is_url(str(self.repository)):
            return None
        from halfserve.export.repository.stored_repository import StoredRepository  # noqa: PLC0415  (rarely needed)

        return StoredRepository(str(self.repository))

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        """The repository's folder, or a likeness of the stored one."""
        if self._stored is None:
            yield Path(self.repository)
        else:
            with self._stored.likeness(self.name) as folder:
                yield folder

    def check(self, source: ModelFile) -> None:
        with self._folder() as repository:
            if self.default_name:
                stored = self._stored
                existing = latest_version(repository / self.name) if stored is None else stored.latest(self.name)
                require_same_network(repository, self.name, source, existing)
            require_addable(repository, self.name, source, version=self.version, max_batch_size=self.max_batch_size)

    @contextmanager
    def file(self) -> Iterator[Path]:
        """A temporary file, on the repository's disk if it has one; a missing repository is not created yet."""
        folder = Path(tempfile.gettempdir()) if self._stored is not None else Path(self.repository).absolute()
        try:
            while not folder.is_dir():
                folder = folder.parent
            hidden = tempfile.TemporaryDirectory(prefix=f".{self.name}.", dir=folder, ignore_cleanup_errors=True)
        except OSError as error:
            raise ExportError(f"cannot write to the repository {self._place}: {error.strerror or error}") from error
        with hidden as made, telling_place(Path(made), f"{self._place}/{self.name}"):
            yield Path(made) / "model.onnx"

    @property
    def _place(self) -> str:
        return str(self.repository) if self._stored is None else self._stored.url

    def recorded(self, source: ModelFile, inputs: Inputs) -> bytes:
        from halfserve.export.repository.recorded_samples import recorded_samples  # noqa: PLC0415  (slow to import)

        return recorded_samples(source, inputs)

    def bound(self, certificate: Certificate, source: ModelFile, model: ModelFile, recorded: bytes) -> Certificate:
        with self._folder() as repository:
            config = config_of_version(
                repository,
                self.name,
                model,
                version=self.version,
                max_batch_size=self.max_batch_size,
                has_twin=self.fp32_twin,
                task=self.task,
            )
            settings = bound_settings(served_config(repository / self.name / CONFIG, config))
        files = bound_files(source if self.fp32_twin else None, self.task, recorded)
        return replace(certificate, files=files, settings=settings)

    def publish(
        self, source: ModelFile, staged: StagedModel, certificate: Certificate | None, recorded: bytes
    ) -> PublishedModel:
        if certificate is None:
            raise ExportError("a version in a repository needs a certificate; verify the model")
        while True:
            with self._folder() as repository:
                written = write_model_version(
                    repository,
                    self.name,
                    open_model(staged.path),
                    certificate,
                    version=self.version,
                    max_batch_size=self.max_batch_size,
                    fp32_twin=source if self.fp32_twin else None,
                    task=self.task,
                    recorded=recorded,
                )
                if self._stored is None:
                    return PublishedModel(path=written)
                url = self._stored.publish(written)
            if url is not None:
                return PublishedModel(path=Path(self.name) / written.name, url=url)
