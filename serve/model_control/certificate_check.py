"""Check that a model version and its certificate belong together.

A repository has certificate.json beside the model, and a model file that `halfserve convert` wrote contains its certificate. It
holds the hashes of the model and of the files that its answers depend on, and the model's metadata holds the hash of the
certificate (see `halfserve.protos.certificates`). A file that was changed or swapped breaks one of them.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from halfserve.files.onnx_outline import DamagedFileError
from halfserve.protos.certificate_signature import VerifyingKey
from halfserve.protos.certificates import (
    CERTIFICATE,
    NAME,
    ModelDigests,
    bound_settings,
    certificate_sha256,
    changed_settings,
    model_digests,
)
from halfserve.protos.pictures import PREPROCESSING
from halfserve.serve.backends.onnx_runtime.onnx_file import OnnxFile, open_onnx
from halfserve.serve.engine.config.model_config import DeclaredConfig
from halfserve.serve.engine.disk_files import CertificateFile, find_certificate, open_regular
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.precision_guard.loading import guard_settings

logger = logging.getLogger(__name__)

TOKENIZER = "tokenizer.json"


def check_certificate(model: Path, declared: DeclaredConfig | None = None, key: VerifyingKey | None = None) -> str | None:
    """Compare a model file, and the files of its version that its answers depend on, with the certificate in or beside it.

    The configuration names files that a certificate may list; one that is missing is reported by the code that reads it, one
    that the certificate does not list is named in a warning. A setting of the configuration that changes the meaning of answers
    and is another than in the certificate is named in a warning; with a key, it is an error. Without a key no signature is
    required.

    Returns:
        "passed" or "failed", as the certificate says; None if no certificate vouches for the model, because there is none or
        the model does not name it. A warning gives the reason, unless a certificate is neither there nor named nor required.

    Raises:
        ModelLoadError: model and certificate do not belong together, the certificate is not signed with the key or not
            readable, or the configuration is another; or, with a key, the certificate that the model names is missing.
    """
    found = find_certificate(model)
    if found is None:
        if not _is_bare(model, declared) and _named(model) is not None:
            _report_missing(model.parent / CERTIFICATE, key)
        elif key is not None:
            logger.warning("%s: has no certificate that the certificate key could check; it is served without a verdict", model)
        return None
    certificate = found.parsed()
    if key is not None:
        _require_signed(found, certificate, key)
    digests, named = _look_into(model)
    # A certificate inside the file cannot know the hash of the whole file, so that one of the two binds it.
    own, field = (digests.content, "content_sha256") if found.is_inside else (digests.file, "onnx_sha256")
    if own != certificate.get(field):
        raise _other_file(model, found, "export it again, or remove the certificate")
    if named is None and key is None:
        logger.warning(
            "%s: its metadata names no certificate, so the one beside it is no proof, and it is served without a verdict; "
            "export it again with halfserve to bind the two",
            model,
        )
        return None
    if named is not None and named != certificate_sha256(certificate):
        raise ModelLoadError(f"{found}: is not the certificate that the model names in its metadata; export the model again")
    if certificate.get("content_sha256") not in (None, "", digests.content):
        raise _other_file(model, found, "export it again")
    _check_files(model.parent, found, certificate, declared)
    if declared is not None:
        _check_settings(found, certificate, declared, is_required=key is not None)
    return "passed" if certificate.get("passed") is True else "failed"


def _is_bare(model: Path, declared: DeclaredConfig | None) -> bool:
    """Return whether a model is a file without a repository: conversion wrote none beside it, and earlier none inside."""
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


def _other_file(path: Path, found: CertificateFile, remedy: str) -> ModelLoadError:
    made = "its certificate" if found.is_inside else CERTIFICATE
    return ModelLoadError(
        f"{path}: is not the file that {made} was made for (its SHA-256 differs from the one there); {remedy}"
    )


def _require_signed(found: CertificateFile, certificate: dict[str, Any], key: VerifyingKey) -> None:
    if not key.signed(certificate):
        what = "is signed with another key, or was changed since" if certificate.get("signature") else "is not signed"
        raise ModelLoadError(
            f"{found}: {what}, expected a signature by the private key of --certificate-key; export the model again with that "
            "key, or remove the certificate"
        )


def _check_files(folder: Path, found: CertificateFile, certificate: dict[str, Any], declared: DeclaredConfig | None) -> None:
    files = _listed(found, certificate)
    for name, digest in files.items():
        file = folder / name
        if file.exists() and _file_sha256(file) != digest:
            shown = Path(os.path.normpath(file))
            raise _other_file(shown, found, "put that file back, export the model again, or remove the certificate")
    if unbound := [name for name in _dependent(declared) if name not in files and (folder / name).exists()]:
        logger.warning(
            "%s: does not hold the hash of %s, so nothing shows whether they belong to the model; export it again to bind them",
            found,
            ", ".join(unbound),
        )


def _check_settings(
    found: CertificateFile, certificate: dict[str, Any], declared: DeclaredConfig, *, is_required: bool
) -> None:
    certified = certificate.get("settings")
    if certified is None:  # an older certificate
        # The model file has the shapes of inputs and outputs too.
        if unbound := [name for name in bound_settings(declared.message) if name != "max_batch_size" and name[-1] != "]"]:
            logger.warning(
                "%s: does not hold settings of %s, so nothing shows whether %s belong to the model; export it again",
                *(found, declared.source, ", ".join(unbound)),
            )
        return
    if not isinstance(certified, dict):
        raise found.not_ours()
    changed = changed_settings(certified, declared.message, says_batch_size=declared.says_batch_size)
    if not changed:
        return
    texts = ", ".join(f"{name} is {_value(now)}, certified was {_value(before)}" for name, (before, now) in changed.items())
    said = f"{declared.source}: is not what {CERTIFICATE} was made for: {texts}; change that back, or export the model again"
    if is_required:
        raise ModelLoadError(said)
    logger.warning("%s", said)


def _value(text: object) -> str:
    return "not set" if text is None else repr(text)


def _listed(found: CertificateFile, certificate: dict[str, Any]) -> dict[str, str]:
    """Return the files that a certificate lists, with their hashes; all lie in the model's folder."""
    files = certificate.get("files", {})
    if not isinstance(files, dict):
        raise found.not_ours()
    for name in files:
        parts = PurePosixPath(name).parts
        if PurePosixPath(name).is_absolute() or ".." in parts[1:]:
            raise ModelLoadError(
                f"{found}: lists the file {name!r}, expected one in the model's folder; export the model again"
            )
    return files


def _dependent(declared: DeclaredConfig | None) -> Iterator[str]:
    """Yield the files that answers may depend on besides the model's own, as paths in the version's folder."""
    if declared is not None:
        yield guard_settings(declared.message, declared.source).fp32_twin
        yield from sorted({f"../{output.label_filename}" for output in declared.message.output if output.label_filename})
    yield from (TOKENIZER, PREPROCESSING)


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
