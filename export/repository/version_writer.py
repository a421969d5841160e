"""Adding versions to a model repository in Triton's layout, atomically beside concurrent readers and writers."""

from __future__ import annotations

import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path

import onnx

from halfserve.export.certificate.certificate import Certificate, signing_key
from halfserve.export.export_errors import ExportError
from halfserve.export.onnx_files.model_file import ModelFile, ModelSource, open_model
from halfserve.export.repository.config_file import (
    config_for,
    padding_text,
    read_config,
    require_agreement,
    require_twin,
    served_config,
    write_config,
)
from halfserve.export.repository.version_files import CONFIG, FP32_TWIN, LABELS, VersionFiles
from halfserve.export.tasks.task import Task
from halfserve.files.atomic_files import sync_folder, write_and_sync
from halfserve.protos.model_config_pb2 import ModelConfig

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
LARGEST_VERSION = 2**63 - 1
FACTORY = "halfserve.model"


def write_model_version(
    repository: Path | str,
    name: str,
    model: ModelSource | ModelFile,
    certificate: Certificate,
    *,
    version: int | None = None,
    max_batch_size: int = 32,
    fp32_twin: ModelSource | ModelFile | None = None,
    task: Task | None = None,
    recorded: bytes = b"",
    certificate_key: Path | str | None = None,
) -> Path:
    """Add a version to a model repository in Triton's layout.

    It writes `NAME/VERSION/model.onnx` with its data files beside it, `NAME/VERSION/certificate.json` and, for a new model,
    `NAME/config.pbtxt`: first in a hidden folder, renamed into place once they are on the disk, so that a reader sees all of
    it or nothing. An existing version is never replaced, and an existing config.pbtxt is kept.

    The float32 twin goes to `NAME/VERSION/fp32/model.onnx`, its data files beside it: in a folder of its own, since the two
    models' data files may have the same names. The parameter `halfserve.fp32_twin` of a new config.pbtxt states the path within
    the version's folder; a server assumes this path where an older config.pbtxt states none. Triton ignores both.

    The certificate names the twin, the task's files and labels with their hashes, and the settings of config.pbtxt that change
    the meaning of answers; the model names the certificate. Where the given ones do not yet, both are changed when they are
    written.

    Args:
        repository: The repository's folder; it is made if it is missing.
        name: Letters, digits, dots, dashes and underscores, a letter or digit first.
        model: The certified ONNX model; with data files as a path.
        certificate: The model's certificate.
        version: 1 or more; the next free one by default.
        max_batch_size: Largest batch that the server may form; 0 for a model without a batch dimension.
        fp32_twin: The original float32 model, for a server that answers from it where float16 fails.
        task: The model's task: config.pbtxt names it and its labels, and its files lie in the version's folder.
        recorded: The result of `recorded_samples`, for `NAME/VERSION/samples.npz`: a server checks its answers with it.
        certificate_key: PEM file of an Ed25519 private key, which signs a certificate that is changed.

    Returns:
        The version's folder.

    Raises:
        ExportError: The name or version is not valid or is taken, the certificate belongs to other bytes, the twin has other
            inputs or outputs, an existing config.pbtxt contradicts the model, or the folder cannot be written to.
    """
    opened = model if isinstance(model, ModelFile) else open_model(model)
    twin = fp32_twin if fp32_twin is None or isinstance(fp32_twin, ModelFile) else open_model(fp32_twin)
    if opened.sha256 != certificate.onnx_sha256:
        raise ExportError(
            "the certificate belongs to another model: its sha256 differs; verify this one and pass its certificate"
        )
    if twin is not None:
        require_twin(opened.outline, twin.outline)
    config = config_of_version(
        repository, name, opened, version=version, max_batch_size=max_batch_size, has_twin=twin is not None, task=task
    )
    signing = signing_key(certificate_key)
    files = VersionFiles(model=opened, twin=twin, certificate=certificate, task=task, recorded=recorded, key=signing)
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


def config_of_version(
    repository: Path | str,
    name: str,
    model: ModelFile,
    *,
    version: int | None = None,
    max_batch_size: int = 32,
    has_twin: bool = False,
    task: Task | None = None,
) -> ModelConfig:
    """Return the configuration that a new model gets; see `write_model_version`, and `require_addable` for errors."""
    config = require_addable(repository, name, model, version=version, max_batch_size=max_batch_size)
    if has_twin:
        config.parameters["halfserve.fp32_twin"].string_value = FP32_TWIN
    if task is not None:
        config.parameters["halfserve.task"].string_value = task.name
        if padding := padding_text(config, task):
            config.parameters["halfserve.padding"].string_value = padding
        for key, value in task.settings.items():
            config.parameters[key].string_value = value
        if task.labels:
            config.output[0].label_filename = LABELS
    return config


def require_addable(
    repository: Path | str, name: str, model: ModelFile, *, version: int | None = None, max_batch_size: int = 32
) -> ModelConfig:
    """Check, before a conversion, that the model, or one that is made from it, can be added; see `write_model_version`.

    Returns:
        The configuration that describes the model.

    Raises:
        ExportError: The name or version is not valid or is taken, the model cannot be batched, or an existing config.pbtxt has
            other inputs, outputs or sizes.
    """
    _require_valid(name, version, max_batch_size)
    existing = Path(repository) / name / CONFIG
    try:
        taken = version is not None and (Path(repository) / name / str(version)).exists()
        has_config = existing.is_file()
    except OSError as error:  # a name that is too long
        raise ExportError(f"cannot write to the repository {repository}: {error.strerror or error}") from error
    if version is not None and taken:
        raise _taken(name, version)
    config = config_for(name, model.outline, max_batch_size=max_batch_size)
    if has_config:
        require_agreement(read_config(existing.read_bytes(), str(existing)), config, str(existing), is_converted=False)
    return config


def _taken(name: str, version: int) -> ExportError:
    return ExportError(f"version {version} of {name!r} exists and is never replaced; leave --version out for the next one")


def require_name(name: str) -> None:
    """Check that a model's name is a plain one.

    Raises:
        ExportError: It is not.
    """
    if not NAME.fullmatch(name):
        raise ExportError(
            f"{name!r} is no model name; use letters, digits, '.', '-' and '_', at most 128, a letter or digit first"
        )


def _require_valid(name: str, version: int | None, max_batch_size: int) -> None:
    require_name(name)
    if version is not None and not 1 <= version <= LARGEST_VERSION:
        raise ExportError(f"{version} is no model version; expected a whole number of at least 1")
    if not 0 <= max_batch_size < 2**31:
        raise ExportError(f"max_batch_size is {max_batch_size}; expected 0 (no batching) or more")


def _add_model(folder: Path, files: VersionFiles, config: ModelConfig, version: int | None) -> Path | None:
    """Rename a model folder into place; None when another writer made it first."""
    number = version or 1
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent, ignore_cleanup_errors=True) as hidden:
        staged = Path(hidden) / folder.name
        staged.mkdir()
        files.write(staged / str(number), config)
        write_and_sync(staged / CONFIG, write_config(config))
        if files.labels:
            write_and_sync(staged / LABELS, files.labels)
        sync_folder(staged)
        if not _renamed(staged, folder):
            return None
    sync_folder(folder.parent)
    return folder / str(number)


def _add_version(folder: Path, files: VersionFiles, config: ModelConfig, version: int | None) -> Path | None:
    """Rename a version folder into place; None when another writer took the number first."""
    target = folder / str(version or _next_version(folder))
    if version is not None and target.exists():
        raise _taken(folder.name, version)
    _require_labels(folder, files.labels)
    _keep_or_write_config(folder / CONFIG, config)
    served = served_config(folder / CONFIG, config)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=folder, ignore_cleanup_errors=True) as hidden:
        staged = Path(hidden) / target.name
        files.write(staged, served)
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
                os.link(staged, path)  # unlike a rename, a link never replaces another writer's file
    require_agreement(read_config(path.read_bytes(), str(path)), config, str(path))


def _require_labels(folder: Path, labels: bytes) -> None:
    """Check that all versions of a model, which share one file of labels, have the same."""
    path = folder / LABELS
    if labels and (not path.is_file() or path.read_bytes() != labels):
        raise ExportError(
            f"{path} does not hold this model's labels, and all versions share that file; give this model another --name"
        )


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


def require_same_network(repository: Path | str, name: str, source: ModelFile, existing: onnx.ModelProto | None) -> None:
    """Check that a model with a default name is the network that already has this name in the repository.

    It is the same network as `existing`, the newest version of that name, if both state the same factory; else if their
    matrices have the same shapes, as after more training.

    Raises:
        ExportError: It is another network.
    """
    if existing is None:
        return
    theirs, ours = _factory(existing), _factory(source.outline)
    if theirs != ours if theirs and ours else _shapes(existing) != _shapes(source.outline):
        made_from = f" made from {theirs}" if theirs else ""
        raise ExportError(
            f"{repository}/{name} holds another network{made_from}, and {name!r} is only this one's default name; give it a "
            f"name of its own with --name, or --name {name} to add it there as the next version"
        )


def latest_version(folder: Path) -> onnx.ModelProto | None:
    """Return the newest readable version in a model's folder, without its weights; None where there is none."""
    try:
        numbers = [int(entry.name) for entry in folder.iterdir() if entry.name.isascii() and entry.name.isdigit()]
    except OSError:
        return None
    for number in sorted(numbers, reverse=True):
        try:
            return open_model(folder / str(number) / "model.onnx").outline
        except ExportError:
            continue
    return None


def _factory(model: onnx.ModelProto) -> str:
    return next((entry.value for entry in model.metadata_props if entry.key == FACTORY), "")


def _shapes(model: onnx.ModelProto) -> set[tuple[int, ...]]:
    """Return the shapes of all matrices and larger tensors; the conversion folds and adds vectors and scalars."""
    return {tuple(tensor.dims) for tensor in model.graph.initializer if len(tensor.dims) > 1}
