"""The bond between a model and its certificate, from both sides.

The certificate holds the file's hash, and the model's metadata the certificate's: a circle, if each covered all of the other.
So the number in the model covers all of the certificate but `onnx_sha256` and `onnx_bytes` (`Certificate.sha256`), and what it
says about the model's content is `graph_sha256`, which covers all of the model but its metadata about certificates. Whoever
changes a weight, a figure or a limit breaks one of the two; `onnx_sha256` still is what `sha256sum model.onnx` prints.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import replace
from pathlib import Path

import onnx

from export.certificate.certificate import Certificate
from export.errors import ExportError
from export.files.atomic_write import sync_folder
from export.files.model_file import ModelFile, ModelSource, open_model, serialize
from export.files.tensor_outline import outlined

PREFIX = "halfserve.certificate"
KEY = "halfserve.certificate_sha256"


def embed(model: onnx.ModelProto, certificate: Certificate) -> tuple[onnx.ModelProto, Certificate]:
    """A copy of the model that names its certificate, and the certificate about that copy's bytes (see `serialize`).

    Raises:
        ExportError: The certificate is about another model.
    """
    _require_same_graph(model, certificate)
    named = onnx.ModelProto()
    named.CopyFrom(model)
    kept = [entry for entry in named.metadata_props if not entry.key.startswith(PREFIX)]
    del named.metadata_props[:]
    named.metadata_props.extend(kept)
    for key, value in entries(certificate).items():
        named.metadata_props.add(key=key, value=value)
    content = serialize(named)
    digest = hashlib.sha256(content).hexdigest()
    return named, replace(certificate, onnx_sha256=digest, onnx_bytes=len(content))


def embed_in_file(path: Path, certificate: Certificate) -> Certificate:
    """Name the certificate in a model file, whose data files stay as they are; the certificate about the new file.

    Metadata is appended to the file: of a message's repeated fields, protobuf reads all parts. A file that names a certificate
    already is written anew.

    Raises:
        ExportError: The certificate is about another model, or the file cannot be written.
    """
    opened = open_model(path)
    _require_same_graph(opened, certificate)
    if any(entry.key.startswith(PREFIX) for entry in opened.outline.metadata_props):
        raise ExportError(f"{path} names a certificate already; convert it anew, or remove its {KEY} from the metadata first")
    suffix = onnx.ModelProto()
    for key, value in entries(certificate).items():
        suffix.metadata_props.add(key=key, value=value)
    _append(path, suffix.SerializeToString(deterministic=True))
    embedded = open_model(path)
    return replace(certificate, onnx_sha256=embedded.sha256, onnx_bytes=embedded.size_bytes)


def entries(certificate: Certificate) -> dict[str, str]:
    """What goes into the metadata of a model for its certificate."""
    return {KEY: certificate.sha256}


def check_embedded(model: ModelSource | ModelFile, certificate: Certificate) -> None:
    """Check that a model and a certificate belong together, from both sides.

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
    """SHA-256, in hexadecimal, of a model without its metadata about certificates, however and wherever weights are stored.

    It covers the message without the bytes of initializers of 1 KiB and more, and then those, one after the other.
    """
    opened = model if isinstance(model, ModelFile) else open_model(model)
    digest = hashlib.sha256()
    with outlined(opened.to_ir()) as outline:
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
