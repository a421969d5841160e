"""The files of one version in a model repository, and their hashes in its certificate."""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from halfserve.export.certificate.certificate import Certificate
from halfserve.export.certificate.embed import embed_in_file, name_of_certificate
from halfserve.export.export_errors import ExportError
from halfserve.export.onnx_files.model_file import ModelFile, open_model
from halfserve.export.tasks.task import Task
from halfserve.files.atomic_files import sync_folder, write_and_sync
from halfserve.protos.certificate_signature import SigningKey
from halfserve.protos.certificates import CERTIFICATE, SAMPLES, bound_settings
from halfserve.protos.model_config_pb2 import ModelConfig

MODEL = "model.onnx"
FP32_TWIN = f"fp32/{MODEL}"
LABELS = "labels.txt"
CONFIG = "config.pbtxt"


@dataclass(frozen=True, kw_only=True)
class VersionFiles:
    """The files of one version.

    Attributes:
        model: The fp16 model.
        twin: The float32 model, if the version has one.
        certificate: The certificate of the fp16 model.
        task: The model's task, whose files lie beside the model and whose labels beside config.pbtxt.
        recorded: Samples with their float32 answers (`recorded_samples`); empty for none.
        key: Signs a certificate that has to be changed.
    """

    model: ModelFile
    twin: ModelFile | None
    certificate: Certificate
    task: Task | None = None
    recorded: bytes = b""
    key: SigningKey | None = None

    @property
    def labels(self) -> bytes:
        """The text of the labels file; empty for a model without labels."""
        return labels_file(self.task)

    def write(self, folder: Path, config: ModelConfig) -> None:
        """Make the folder with all files, and wait until it is on the disk. `config` is the model's configuration.

        Raises:
            ExportError: A source file, or what a signed certificate is about, changed since it was opened.
            OSError: As the system reports it.
        """
        folder.mkdir()
        place_model(self.model, folder / MODEL)
        if open_model(folder / MODEL).sha256 != self.certificate.onnx_sha256:
            raise ExportError(f"{self.model.name} changed while it was copied; verify it again")
        if self.twin is not None:
            (folder / FP32_TWIN).parent.mkdir()
            place_model(self.twin, folder / FP32_TWIN)
            if open_model(folder / FP32_TWIN).sha256 != self.twin.sha256:
                raise ExportError(f"{self.twin.name} changed while it was copied; export it again")
            sync_folder((folder / FP32_TWIN).parent)
        for name, content in self.task.files.items() if self.task is not None else ():
            write_and_sync(folder / name, content)
        if self.recorded:
            write_and_sync(folder / SAMPLES, self.recorded)
        write_and_sync(folder / CERTIFICATE, self._bound(folder / MODEL, config).to_bytes())
        sync_folder(folder)

    def _bound(self, model: Path, config: ModelConfig) -> Certificate:
        """Return the certificate that names all files of the version and the settings of its model, which the written model
        names.
        """
        certificate = self.certificate
        bound = replace(certificate, files=bound_files(self.twin, self.task, self.recorded), settings=bound_settings(config))
        if certificate == bound and certificate.sha256 == name_of_certificate(open_model(model)):
            return certificate
        if certificate.signature and self.key is None:
            raise ExportError(
                f"the certificate is signed, and lacks the settings of {CONFIG} or files of this version, or these changed "
                "meanwhile; give certificate_key to sign it again"
            )
        return embed_in_file(model, bound, key=self.key)


def bound_files(twin: ModelFile | None, task: Task | None, recorded: bytes = b"") -> dict[str, str]:
    """SHA-256 in hexadecimal of the files that a version's answers depend on besides the model, by path in its folder."""
    contents = {} if task is None else dict(task.files)
    if recorded:
        contents[SAMPLES] = recorded
    if labels := labels_file(task):
        contents[f"../{LABELS}"] = labels  # beside config.pbtxt
    found = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    if twin is not None:
        folder = Path(FP32_TWIN).parent
        found[FP32_TWIN] = twin.own_digests.file
        found |= {(folder / location).as_posix(): digest for location, digest in twin.data_digests.items()}
    return found


def labels_file(task: Task | None) -> bytes:
    """Return the text of a task's labels file; empty where it has no labels."""
    return "".join(f"{label}\n" for label in task.labels).encode() if task is not None else b""


def place_model(model: ModelFile, place: Path) -> None:
    """Write or copy a model to `place`, its data files beside it under their own names.

    Raises:
        ExportError: A data file has the name of the model or of its certificate.
        OSError: As the system reports it.
    """
    if model.path is None:
        write_and_sync(place, model.content)
        return
    _copy(model.path, place)
    for location, file in zip(model.locations, model.data_files, strict=True):
        copied = place.parent / location
        if Path(location).parts[0] in (MODEL, CERTIFICATE, SAMPLES, Path(FP32_TWIN).parts[0]):
            raise ExportError(f"{model.name} keeps weights in {location!r}, a name that the repository needs; rename that file")
        copied.parent.mkdir(parents=True, exist_ok=True)
        _copy(file, copied)
        sync_folder(copied.parent)


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    descriptor = os.open(target, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
