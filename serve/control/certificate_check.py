"""Whether a model file is the one that the certificate beside it was made for.

`halfserve export` writes certificate.json beside the model, with the model's hash in it, and the hash of the certificate goes
into the model's metadata. A file that was changed, or swapped for another, breaks one of the two.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from serve.engine.errors import ModelLoadError
from serve.engine.regular_files import open_regular, read_regular

CERTIFICATE_FILE = "certificate.json"
SCHEMA = "halfserve.certificate"
EMBEDDED_KEY = "halfserve.certificate_sha256"
NOT_HASHED = frozenset({"onnx_sha256", "onnx_bytes"})  # they depend on the hash that the model's metadata holds
MAX_BYTES = 64 * 2**20


def check_certificate(model: Path) -> str | None:
    """Compare a model file with the certificate beside it.

    Args:
        model: the file; with data files, these are in its folder.

    Returns:
        "passed" or "failed", as the certificate says; None where there is none.

    Raises:
        ModelLoadError: they do not belong together, or the certificate cannot be read.
    """
    path = model.parent / CERTIFICATE_FILE
    if not path.exists():
        return None
    certificate = _read(path)
    locations, embedded = _look_into(model)
    if _sha256(model, locations) != certificate.get("onnx_sha256"):
        raise ModelLoadError(
            f"{model}: is not the file that {CERTIFICATE_FILE} beside it was made for (its SHA-256 differs); "
            "export it again, or remove the certificate"
        )
    if embedded is not None and embedded != _certificate_sha256(certificate):
        raise ModelLoadError(f"{path}: is not the certificate that the model names in its metadata; export the model again")
    return "passed" if certificate.get("passed") is True else "failed"


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ModelLoadError(f"{path}: has {path.stat().st_size} bytes, expected a certificate of at most {MAX_BYTES}")
        content = json.loads(read_regular(path))
    except OSError as error:  # of the system or the disk, which says nothing about the certificate
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ModelLoadError(f"{path}: cannot be read: it is no JSON; export the model again, or remove the file") from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ModelLoadError(f"{path}: is no certificate that halfserve wrote; remove it, or export the model again")
    return content


def _look_into(model: Path) -> tuple[list[str], str | None]:
    """The data files that a model names, and the hash of the certificate that it names."""
    if model.suffix != ".onnx":
        return [], None
    from serve.backends.onnx_runtime.onnx_file import open_onnx  # noqa: PLC0415  (only where there is a certificate)

    with open_onnx(model) as opened:
        entries = opened.model.metadata_props
        embedded = next((entry.value for entry in entries if entry.key == EMBEDDED_KEY), None)
        return sorted(opened.data_files), embedded


def _sha256(model: Path, locations: list[str]) -> str:
    """Of the file; with data files, of the lines that sha256sum prints for the model (called `model`) and for each of them."""
    if not locations:
        return _file_sha256(model)
    lines = [f"{_file_sha256(model)}  model\n"]
    lines += [f"{_file_sha256(model.parent / location)}  {location}\n" for location in locations]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _file_sha256(path: Path) -> str:
    if not path.exists():
        raise ModelLoadError(f"{path}: is missing; the model beside it keeps weights there")
    try:
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from None


def _certificate_sha256(certificate: dict[str, Any]) -> str:
    content = {name: value for name, value in certificate.items() if name not in NOT_HASHED}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
