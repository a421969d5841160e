"""Targets of a conversion: what every target does, and a file; a version in a repository is `repository.repository_target`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from halfserve.export.export_errors import ExportError
from halfserve.export.onnx_files.model_file import ModelFile, open_model
from halfserve.export.onnx_files.model_writer import StagedModel, superseded_files
from halfserve.export.onnx_fp16.convert import require_free

if TYPE_CHECKING:
    from halfserve.export.certificate.certificate import Certificate
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
        """Yield the file that the model is staged for."""
        ...

    def recorded(self, source: ModelFile, inputs: Inputs) -> bytes:
        """Return the samples to write beside the model, with their float32 answers (`recorded_samples`); empty for none."""
        ...

    def bound(self, certificate: Certificate, source: ModelFile, model: ModelFile, recorded: bytes) -> Certificate:
        """Return the certificate with the files and settings that the model, made from `source`, is written with.

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
