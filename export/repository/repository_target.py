"""A version in a model repository as the target of a conversion."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from halfserve.export.conversion_targets import PublishedModel
from halfserve.export.export_errors import ExportError, telling_place
from halfserve.export.onnx_files.model_file import ModelFile, open_model
from halfserve.export.onnx_files.model_writer import StagedModel
from halfserve.export.repository.config_file import served_config
from halfserve.export.repository.version_files import CONFIG, bound_files
from halfserve.export.repository.version_writer import (
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
        """Yield the repository's folder, or a likeness of the stored one."""
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
        """Yield a temporary file, on the repository's disk if it has one; a missing repository is not created yet."""
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
