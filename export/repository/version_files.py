"""The files of one version in a model repository."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from export.errors import ExportError
from export.files.atomic_write import sync_folder, write_and_sync
from export.files.model_file import ModelFile, open_model

if TYPE_CHECKING:
    from export.certificate.certificate import Certificate

MODEL = "model.onnx"
FP32_TWIN = f"fp32/{MODEL}"
CERTIFICATE = "certificate.json"


@dataclass(frozen=True, kw_only=True)
class VersionFiles:
    """What a version's folder holds.

    Attributes:
        model: The fp16 model.
        twin: The float32 model, if it goes along.
        certificate: The fp16 model's.
    """

    model: ModelFile
    twin: ModelFile | None
    certificate: Certificate

    def write(self, folder: Path) -> None:
        """Make the folder with everything in it, and wait until it is on the disk.

        Raises:
            ExportError: A source file changed since it was opened.
            OSError: As the system reports it.
        """
        folder.mkdir()
        place_model(self.model, folder / MODEL)
        if open_model(folder / MODEL).sha256 != self.certificate.onnx_sha256:
            raise ExportError(f"{self.model.name} changed while it was copied; verify it again")
        if self.twin is not None:
            (folder / FP32_TWIN).parent.mkdir()
            place_model(self.twin, folder / FP32_TWIN)
            sync_folder((folder / FP32_TWIN).parent)
        write_and_sync(folder / CERTIFICATE, self.certificate.to_bytes())
        sync_folder(folder)


def place_model(model: ModelFile, place: Path) -> None:
    """Write or copy a model to `place`, its data files beside it under the names that it knows them by.

    Raises:
        ExportError: A data file has the name of the model's own place or of its certificate.
        OSError: As the system reports it.
    """
    if model.path is None:
        write_and_sync(place, model.content)
        return
    _copy(model.path, place)
    for location, file in zip(model.locations, model.data_files, strict=True):
        copied = place.parent / location
        if Path(location).parts[0] in (MODEL, CERTIFICATE, Path(FP32_TWIN).parts[0]):
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
