"""Check that a model version and the certificate beside it belong together.

`halfserve export` writes certificate.json beside the model. It holds the hashes of the model and of the files that its answers
depend on, and the model's metadata holds the hash of the certificate (see `halfserve.protos.certificates`). A file that was
changed or swapped breaks one of them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from halfserve.files.onnx_outline import DamagedFileError
from halfserve.protos.certificate_signature import VerifyingKey
from halfserve.protos.certificates import CERTIFICATE, NAME, SCHEMA, ModelDigests, certificate_sha256, model_digests
from halfserve.serve.backends.cpu_trials import RecordedSamples, read_samples
from halfserve.serve.backends.onnx_runtime.onnx_file import OnnxFile, open_onnx
from halfserve.serve.engine.config.model_config import DeclaredConfig
from halfserve.serve.engine.disk_files import open_regular, read_regular
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.precision_guard.loading import guard_settings
from halfserve.serve.engine.repository.loaded_version import LoadedVersion

logger = logging.getLogger(__name__)

MAX_BYTES = 64 * 2**20
TOKENIZER = "tokenizer.json"
VERDICT_KEY = "halfserve.certificate"  # the parameter that shows clients what `check_certificate` returned


def check_certificate(model: Path, declared: DeclaredConfig | None = None, key: VerifyingKey | None = None) -> str | None:
    """Compare a model file, and the files of its version that its answers depend on, with the certificate beside it.

    The configuration names files that a certificate may list; one that is missing is reported by the code that reads it, one
    that the certificate does not list is named in a warning. Without a key no signature is required.

    Returns:
        "passed" or "failed", as the certificate says; None if no certificate vouches for the model, because there is none or
        the model does not name it. A warning gives the reason, unless a certificate is neither there nor named nor required.

    Raises:
        ModelLoadError: model and certificate do not belong together, or the certificate is not signed with the key, not
            readable, or, with a key, missing although the model names one.
    """
    path = model.parent / CERTIFICATE
    if not path.exists():
        if not _is_bare(model, declared) and _named(model) is not None:
            _report_missing(path, key)
        elif key is not None:
            logger.warning("%s: has no certificate that the certificate key could check; it is served without a verdict", model)
        return None
    certificate = _read(path)
    if key is not None:
        _require_signed(path, certificate, key)
    digests, named = _look_into(model)
    if digests.file != certificate.get("onnx_sha256"):
        raise _other_file(model, "export it again, or remove the certificate")
    if named is None and key is None:
        logger.warning(
            "%s: its metadata names no certificate, so the one beside it is no proof, and it is served without a verdict; "
            "export it again with halfserve to bind the two",
            model,
        )
        return None
    if named is not None and named != certificate_sha256(certificate):
        raise ModelLoadError(f"{path}: is not the certificate that the model names in its metadata; export the model again")
    if certificate.get("content_sha256") not in (None, "", digests.content):
        raise _other_file(model, "export it again")
    _check_files(path, certificate, declared)
    return "passed" if certificate.get("passed") is True else "failed"


def vouched_samples(version: LoadedVersion) -> RecordedSamples | None:
    """Return the samples beside a version whose certificate has been checked; None if the certificate vouches for none.

    Raises:
        ModelLoadError: the certificate can no longer be read.
    """
    if VERDICT_KEY not in version.config.parameters:
        return None
    model = version.files.model
    return read_samples(model, _read(model.parent / CERTIFICATE), version.interface)


def _is_bare(model: Path, declared: DeclaredConfig | None) -> bool:
    """Return whether a model is a file without a repository: conversion writes no certificate beside it."""
    return declared is not None and declared.source == model


def _report_missing(path: Path, key: VerifyingKey | None) -> None:
    """Warn of a certificate that a model names and that is not there.

    Raises:
        ModelLoadError: a key requires the certificate.
    """
    missing = f"{path}: is missing, and the model beside it names a certificate in its metadata"
    if key is not None:
        raise ModelLoadError(
            f"{missing}; --certificate-key takes no such model: put the certificate back, or export it again with that key"
        )
    logger.warning(
        "%s; nothing shows whether the model was changed, and it is served without a verdict: put the certificate back, or "
        "export the model again",
        missing,
    )


def _other_file(path: Path, remedy: str) -> ModelLoadError:
    return ModelLoadError(
        f"{path}: is not the file that {CERTIFICATE} was made for (its SHA-256 differs from the one there); {remedy}"
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ModelLoadError(f"{path}: has {path.stat().st_size} bytes, expected a certificate of at most {MAX_BYTES}")
        content = json.loads(read_regular(path))
    except OSError as error:  # an error of the system or the disk, not of the certificate
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ModelLoadError(f"{path}: cannot be read: it is no JSON; export the model again, or remove the file") from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise _no_certificate(path)
    return content


def _no_certificate(path: Path) -> ModelLoadError:
    return ModelLoadError(f"{path}: is no certificate that halfserve wrote; remove it, or export the model again")


def _require_signed(path: Path, certificate: dict[str, Any], key: VerifyingKey) -> None:
    if not key.signed(certificate):
        what = "is signed with another key, or was changed since" if certificate.get("signature") else "is not signed"
        raise ModelLoadError(
            f"{path}: {what}, expected a signature by the private key of --certificate-key; export the model again with that "
            "key, or remove the certificate"
        )


def _check_files(path: Path, certificate: dict[str, Any], declared: DeclaredConfig | None) -> None:
    files = _listed(path, certificate)
    for name, digest in files.items():
        file = path.parent / name
        if file.exists() and _file_sha256(file) != digest:
            shown = Path(os.path.normpath(file))
            raise _other_file(shown, "put that file back, export the model again, or remove the certificate")
    if unbound := [name for name in _dependent(declared) if name not in files and (path.parent / name).exists()]:
        logger.warning(
            "%s: does not hold the hash of %s, so nothing shows whether they belong to the model; export it again to bind them",
            path,
            ", ".join(unbound),
        )


def _listed(path: Path, certificate: dict[str, Any]) -> dict[str, str]:
    """Return the files that a certificate lists, with their hashes; all lie in the model's folder."""
    files = certificate.get("files", {})
    if not isinstance(files, dict):
        raise _no_certificate(path)
    for name in files:
        parts = PurePosixPath(name).parts
        if PurePosixPath(name).is_absolute() or ".." in parts[1:]:
            raise ModelLoadError(f"{path}: lists the file {name!r}, expected one in the model's folder; export the model again")
    return files


def _dependent(declared: DeclaredConfig | None) -> Iterator[str]:
    """Yield the files that answers may depend on besides the model's own, as paths in the version's folder."""
    if declared is not None:
        yield guard_settings(declared.message, declared.source).fp32_twin
        yield from sorted({f"../{output.label_filename}" for output in declared.message.output if output.label_filename})
    yield TOKENIZER


def _named(model: Path) -> str | None:
    """Return the hash of the certificate that a model names; None for none."""
    if model.suffix != ".onnx":
        return None
    with open_onnx(model) as opened:
        return _name_in(opened)


def _name_in(opened: OnnxFile) -> str | None:
    return next((entry.value for entry in opened.model.metadata_props if entry.key == NAME), None)


def _look_into(model: Path) -> tuple[ModelDigests, str | None]:
    """Return the hashes of a model with its data files, and the hash of the certificate that it names."""
    if model.suffix != ".onnx":
        digest = _file_sha256(model)
        return ModelDigests(file=digest, content=digest), None
    with open_onnx(model) as opened:
        named = _name_in(opened)
        locations = sorted(opened.data_files)
    try:
        with open_regular(model) as file:
            own = model_digests(file, os.fstat(file.fileno()).st_size)
    except (OSError, DamagedFileError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ModelLoadError(f"{model}: cannot be read: {reason}") from None
    return own.with_data_files({location: _file_sha256(model.parent / location) for location in locations}), named


def _file_sha256(path: Path) -> str:
    if not path.exists():
        raise ModelLoadError(f"{path}: is missing; the model beside it keeps weights there")
    try:
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from None
