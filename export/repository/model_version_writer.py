"""A version in a model repository, whole or not at all, whoever reads or writes there at the same time."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from export.atomic_write import sync_folder, write_and_sync
from export.errors import ExportError
from export.model_file import ModelSource, load_model
from export.repository.model_config import config_for, read_config, require_agreement, write_config

if TYPE_CHECKING:
    from export.certificate.certificate import Certificate
    from protos.model_config_pb2 import ModelConfig

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
LARGEST_VERSION = 2**63 - 1


def write_model_version(
    repository: Path | str,
    name: str,
    model: ModelSource,
    certificate: Certificate,
    *,
    version: int | None = None,
    max_batch_size: int = 32,
) -> Path:
    """Add a version to a model repository in Triton's layout.

    Written are `NAME/VERSION/model.onnx`, `NAME/VERSION/certificate.json` and, for a new model, `NAME/config.pbtxt`. They are
    made in a hidden folder beside and renamed into place once they are on the disk, so a reader sees nothing or all of it. A
    version that exists is never replaced, and a config.pbtxt that exists is kept.

    Args:
        repository: The repository's folder; it is made if it is missing.
        name: Letters, digits, dots, dashes and underscores, a letter or digit first.
        model: The ONNX model that the certificate is about.
        certificate: Its certificate.
        version: 1 or more; the next free one by default.
        max_batch_size: Largest batch that the server may form; 0 for a model without a batch dimension.

    Returns:
        The version's folder.

    Raises:
        ExportError: The name or version is not valid or is taken, the certificate belongs to other bytes, an existing
            config.pbtxt contradicts the model, or the folder cannot be written to.
    """
    _require_valid(name, version, max_batch_size)
    message, content = load_model(model)
    if hashlib.sha256(content).hexdigest() != certificate.onnx_sha256:
        raise ExportError(
            "the certificate belongs to another model: its sha256 differs; verify this one and pass its certificate"
        )
    config = config_for(name, message, max_batch_size=max_batch_size)
    files = {"model.onnx": content, "certificate.json": certificate.to_bytes()}
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


def _require_valid(name: str, version: int | None, max_batch_size: int) -> None:
    if not NAME.fullmatch(name):
        raise ExportError(
            f"{name!r} is no model name; use letters, digits, '.', '-' and '_', at most 128, a letter or digit first"
        )
    if version is not None and not 1 <= version <= LARGEST_VERSION:
        raise ExportError(f"{version} is no model version; expected a whole number of at least 1")
    if not 0 <= max_batch_size < 2**31:
        raise ExportError(f"max_batch_size is {max_batch_size}; expected 0 (no batching) or more")


def _add_model(folder: Path, files: dict[str, bytes], config: ModelConfig, version: int | None) -> Path | None:
    """Rename a whole model folder into place; None when another writer made it first."""
    number = version or 1
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent, ignore_cleanup_errors=True) as hidden:
        staged = Path(hidden) / folder.name
        staged.mkdir()
        _write_folder(staged / str(number), files)
        write_and_sync(staged / "config.pbtxt", write_config(config))
        sync_folder(staged)
        if not _renamed(staged, folder):
            return None
    sync_folder(folder.parent)
    return folder / str(number)


def _add_version(folder: Path, files: dict[str, bytes], config: ModelConfig, version: int | None) -> Path | None:
    """Rename a version folder into place; None when another writer took the number that was free."""
    target = folder / str(version or _next_version(folder))
    if version is not None and target.exists():
        raise ExportError(
            f"version {version} of {folder.name!r} exists and is never replaced; leave --version out for the next one"
        )
    _keep_or_write_config(folder / "config.pbtxt", config)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=folder, ignore_cleanup_errors=True) as hidden:
        staged = Path(hidden) / target.name
        _write_folder(staged, files)
        if not _renamed(staged, target):
            return None
    sync_folder(folder)
    return target


def _keep_or_write_config(path: Path, config: ModelConfig) -> None:
    if not path.exists():
        staged = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            write_and_sync(staged, write_config(config))
            os.link(staged, path)  # unlike a rename, it never replaces what another writer put there in the meantime
        except FileExistsError:
            pass
        finally:
            staged.unlink(missing_ok=True)
    require_agreement(read_config(path.read_bytes(), str(path)), config, str(path))


def _next_version(folder: Path) -> int:
    numbers = [int(entry.name) for entry in folder.iterdir() if entry.name.isascii() and entry.name.isdigit()]
    return max(numbers, default=0) + 1


def _write_folder(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir()
    for name, content in files.items():
        write_and_sync(folder / name, content)
    sync_folder(folder)


def _renamed(staged: Path, target: Path) -> bool:
    try:
        staged.rename(target)
    except OSError:
        if target.exists():
            return False
        raise
    return True
