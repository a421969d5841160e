"""Mutual hashes that bind a model file and its certificate.

The certificate holds a hash of the model, and the model's metadata a hash of the certificate. To avoid a cycle, the hash in the
model omits the certificate's `onnx_sha256` and `onnx_bytes` (`Certificate.sha256`), and the certificate's `graph_sha256` omits
the model's metadata about certificates. A changed weight, figure or limit breaks one of the two. `onnx_sha256` remains the
output of `sha256sum model.onnx`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import replace
from pathlib import Path

import onnx

from halfserve.export.certificate.certificate import Certificate
from halfserve.export.errors import ExportError
from halfserve.export.onnx_files.external_data import detached
from halfserve.export.onnx_files.model_file import ModelFile, ModelSource, open_model, serialize
from halfserve.protos.atomic_files import sync_folder

PREFIX = "halfserve.certificate"
KEY = "halfserve.certificate_sha256"


def embed(model: onnx.ModelProto, certificate: Certificate) -> tuple[onnx.ModelProto, Certificate]:
    """Return a copy of the model that names its certificate, and the certificate for that copy's bytes (see `serialize`).

    Raises:
        ExportError: The certificate is about another model.
    """
    _require_same_graph(model, certificate)
    named = onnx.ModelProto()
    named.CopyFrom(model)
    kept = [entry for entry in named.metadata_props if not entry.key.startswith(PREFIX)]
    del named.metadata_props[:]
    named.metadata_props.extend(kept)
    named.metadata_props.add(key=KEY, value=certificate.sha256)
    content = serialize(named)
    digest = hashlib.sha256(content).hexdigest()
    return named, replace(certificate, onnx_sha256=digest, onnx_bytes=len(content))


def embed_in_file(path: Path, certificate: Certificate) -> Certificate:
    """Name the certificate in a model file and return the certificate for the new file. Data files stay untouched.

    The metadata is appended to the file, since protobuf concatenates the parts of a repeated field.

    Raises:
        ExportError: The certificate is about another model, the file names a certificate already, or it cannot be written.
    """
    opened = open_model(path)
    _require_same_graph(opened, certificate)
    if any(entry.key.startswith(PREFIX) for entry in opened.outline.metadata_props):
        raise ExportError(f"{path} names a certificate already; convert the model again, or remove {KEY} from its metadata")
    suffix = onnx.ModelProto()
    suffix.metadata_props.add(key=KEY, value=certificate.sha256)
    _append(path, suffix.SerializeToString(deterministic=True))
    embedded = open_model(path)
    return replace(certificate, onnx_sha256=embedded.sha256, onnx_bytes=embedded.size_bytes)


def check_embedded(model: ModelSource | ModelFile, certificate: Certificate) -> None:
    """Check that a model and a certificate name each other.

    Raises:
        ExportError: The model names no certificate or another one, or the certificate is about another model.
    """
    opened = model if isinstance(model, ModelFile) else open_model(model)
    found = next((entry.value for entry in opened.outline.metadata_props if entry.key == KEY), None)
    if found is None:
        raise ExportError(f"{opened.name} names no certificate in its metadata ({KEY}); verify it and embed its certificate")
    if found != certificate.sha256:
        raise ExportError(f"{opened.name} names the certificate {found[:12]}..., this one is {certificate.sha256[:12]}...")
    _require_same_graph(opened, certificate)


def graph_sha256(model: ModelSource | ModelFile) -> str:
    """SHA-256 in hexadecimal of a model's content: independent of how weights are stored, without metadata of certificates.

    Covers the message without the bytes of initializers of 1 KiB and more, then those bytes in order.
    """
    opened = model if isinstance(model, ModelFile) else open_model(model)
    digest = hashlib.sha256()
    with detached(opened.to_ir()) as outline:
        message = outline.proto
        kept = [entry for entry in message.metadata_props if not entry.key.startswith(PREFIX)]
        del message.metadata_props[:]
        message.metadata_props.extend(sorted(kept, key=lambda entry: (entry.key, entry.value)))
        digest.update(message.SerializeToString(deterministic=True))
        for tensor, _ in outline.tensors:
            digest.update(tensor.tobytes())
    return digest.hexdigest()


def _append(path: Path, suffix: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        shutil.copyfile(path, temporary)
        with temporary.open("ab") as file:
            file.write(suffix)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise ExportError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _require_same_graph(model: ModelSource | ModelFile, certificate: Certificate) -> None:
    if certificate.graph_sha256 and graph_sha256(model) != certificate.graph_sha256:
        raise ExportError("the certificate belongs to another model: its graph_sha256 differs; verify this one")
