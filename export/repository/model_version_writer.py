"""A version in a model repository, whole or not at all, whoever reads or writes there at the same time."""

from __future__ import annotations

import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from export.errors import ExportError
from export.files.atomic_write import sync_folder, write_and_sync
from export.files.model_file import ModelFile, ModelSource, open_model
from export.repository.model_config import config_for, read_config, require_agreement, require_twin, write_config
from export.repository.version_files import FP32_TWIN, VersionFiles

if TYPE_CHECKING:
    from export.certificate.certificate import Certificate
    from protos.model_config_pb2 import ModelConfig

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
LARGEST_VERSION = 2**63 - 1


def write_model_version(
    repository: Path | str,
    name: str,
    model: ModelSource | ModelFile,
    certificate: Certificate,
    *,
    version: int | None = None,
    max_batch_size: int = 32,
    fp32_twin: ModelSource | ModelFile | None = None,
) -> Path:
    """Add a version to a model repository in Triton's layout.

    Written are `NAME/VERSION/model.onnx` with its data files beside it, `NAME/VERSION/certificate.json` and, for a new model,
    `NAME/config.pbtxt`. They are made in a hidden folder beside and renamed into place once they are on the disk, so a reader
    sees nothing or all of it. A version that exists is never replaced, and a config.pbtxt that exists is kept.

    The float32 twin goes to `NAME/VERSION/fp32/model.onnx`, its data files beside it: in a folder of its own, since the two
    models' data files may have the same names. The parameter `halfserve.fp32_twin` of a new config.pbtxt says so, as a path in
    the version's folder. A server takes that path, or this one where an older config.pbtxt does not say, in every version that
    has the file. Triton loads `model.onnx` and looks at neither.

    Args:
        repository: The repository's folder; it is made if it is missing.
        name: Letters, digits, dots, dashes and underscores, a letter or digit first.
        model: The ONNX model that the certificate is about; with data files as a path.
        certificate: Its certificate.
        version: 1 or more; the next free one by default.
        max_batch_size: Largest batch that the server may form; 0 for a model without a batch dimension.
        fp32_twin: The float32 model that this one was made from, for a server that answers from it where float16 fails.

    Returns:
        The version's folder.

    Raises:
        ExportError: The name or version is not valid or is taken, the certificate belongs to other bytes, the twin takes or
            gives other tensors, an existing config.pbtxt contradicts the model, or the folder cannot be written to.
    """
    opened = model if isinstance(model, ModelFile) else open_model(model)
    twin = fp32_twin if fp32_twin is None or isinstance(fp32_twin, ModelFile) else open_model(fp32_twin)
    if opened.sha256 != certificate.onnx_sha256:
        raise ExportError(
            "the certificate belongs to another model: its sha256 differs; verify this one and pass its certificate"
        )
    config = require_addable(repository, name, opened, version=version, max_batch_size=max_batch_size)
    if twin is not None:
        require_twin(opened.outline, twin.outline)
        config.parameters["halfserve.fp32_twin"].string_value = FP32_TWIN
    files = VersionFiles(model=opened, twin=twin, certificate=certificate)
    folder = Path(repository) / name
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        while True:
            written = (
                _add_version(folder, files, config, version) if folder.exists() else _add_model(folder, files, config, version)
            )
            if written is not None:
                return written
    except OSError as error:
        raise ExportError(f"cannot write to the repository {repository}: {error.strerror or error}") from error


def require_addable(
    repository: Path | str, name: str, model: ModelFile, *, version: int | None = None, max_batch_size: int = 32
) -> ModelConfig:
    """Check that a model with these inputs and outputs can be added, as far as it can be told before.

    Args:
        repository: See `write_model_version`, as for the rest.
        name: The model's name.
        model: The model, or the one that it will be made from.
        version: The version.
        max_batch_size: Largest batch.

    Returns:
        The configuration that describes the model.

    Raises:
        ExportError: The name or version is not valid or is taken, or there can be no such batches.
    """
    _require_valid(name, version, max_batch_size)
    try:
        taken = version is not None and (Path(repository) / name / str(version)).exists()
    except OSError as error:  # a name that is too long
        raise ExportError(f"cannot write to the repository {repository}: {error.strerror or error}") from error
    if version is not None and taken:
        raise _taken(name, version)
    return config_for(name, model.outline, max_batch_size=max_batch_size)


def _taken(name: str, version: int) -> ExportError:
    return ExportError(f"version {version} of {name!r} exists and is never replaced; leave --version out for the next one")


def _require_valid(name: str, version: int | None, max_batch_size: int) -> None:
    if not NAME.fullmatch(name):
        raise ExportError(
            f"{name!r} is no model name; use letters, digits, '.', '-' and '_', at most 128, a letter or digit first"
        )
    if version is not None and not 1 <= version <= LARGEST_VERSION:
        raise ExportError(f"{version} is no model version; expected a whole number of at least 1")
    if not 0 <= max_batch_size < 2**31:
        raise ExportError(f"max_batch_size is {max_batch_size}; expected 0 (no batching) or more")


def _add_model(folder: Path, files: VersionFiles, config: ModelConfig, version: int | None) -> Path | None:
    """Rename a whole model folder into place; None when another writer made it first."""
    number = version or 1
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent, ignore_cleanup_errors=True) as hidden:
        staged = Path(hidden) / folder.name
        staged.mkdir()
        files.write(staged / str(number))
        write_and_sync(staged / "config.pbtxt", write_config(config))
        sync_folder(staged)
        if not _renamed(staged, folder):
            return None
    sync_folder(folder.parent)
    return folder / str(number)


def _add_version(folder: Path, files: VersionFiles, config: ModelConfig, version: int | None) -> Path | None:
    """Rename a version folder into place; None when another writer took the number that was free."""
    target = folder / str(version or _next_version(folder))
    if version is not None and target.exists():
        raise _taken(folder.name, version)
    _keep_or_write_config(folder / "config.pbtxt", config)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=folder, ignore_cleanup_errors=True) as hidden:
        staged = Path(hidden) / target.name
        files.write(staged)
        if not _renamed(staged, target):
            return None
    sync_folder(folder)
    return target


def _keep_or_write_config(path: Path, config: ModelConfig) -> None:
    if not path.exists():
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent, ignore_cleanup_errors=True) as hidden:
            staged = Path(hidden) / path.name
            write_and_sync(staged, write_config(config))
            with suppress(FileExistsError):
                os.link(staged, path)  # unlike a rename, it never replaces what another writer put there in the meantime
    require_agreement(read_config(path.read_bytes(), str(path)), config, str(path))


def _next_version(folder: Path) -> int:
    numbers = [int(entry.name) for entry in folder.iterdir() if entry.name.isascii() and entry.name.isdigit()]
    return max(numbers, default=0) + 1


def _renamed(staged: Path, target: Path) -> bool:
    try:
        staged.rename(target)
    except OSError:
        if target.exists():
            return False
        raise
    return True
