"""Mutual hashes that bind a model file and its certificate (see `halfserve.protos.certificates`)."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import onnx

from halfserve.export.certificate.certificate import Certificate, read_certificate
from halfserve.export.export_errors import ExportError
from halfserve.export.onnx_files.external_data import detached
from halfserve.export.onnx_files.model_file import ModelFile, ModelSource, open_model, serialize
from halfserve.files.atomic_files import sync_folder
from halfserve.protos.certificate_signature import SigningKey
from halfserve.protos.certificates import (
    CERTIFICATE,
    INSIDE,
    NAME,
    PIECE_BYTES,
    certificate_entry,
    named_entry,
    unnamed_pieces,
    unpacked_certificate,
)

PREFIX = "halfserve.certificate"
KEY = NAME


def embed(model: onnx.ModelProto, certificate: Certificate) -> tuple[onnx.ModelProto, Certificate]:
    """Return a copy of the model that names its certificate, and the certificate for that copy's bytes (see `serialize`).

    The certificate loses a signature, which would not cover the new hashes: sign it afterwards.

    Raises:
        ExportError: The certificate is about another model.
    """
    _require_same_graph(model, certificate)
    named = onnx.ModelProto()
    named.CopyFrom(model)
    kept = [entry for entry in named.metadata_props if not entry.key.startswith(PREFIX)]
    del named.metadata_props[:]
    named.metadata_props.extend(kept)
    bound = replace(certificate, content_sha256=hashlib.sha256(serialize(named)).hexdigest(), signature="")
    named.metadata_props.add(key=KEY, value=bound.sha256)
    content = serialize(named)
    return named, replace(bound, onnx_sha256=hashlib.sha256(content).hexdigest(), onnx_bytes=len(content))


def embed_in_file(
    path: Path, certificate: Certificate, *, key: SigningKey | None = None, is_inside: bool = False
) -> Certificate:
    """Name the certificate in a model file and return the certificate for the new file. Data files stay untouched.

    The metadata is appended to the file, since protobuf concatenates the parts of a repeated field; entries about another
    certificate are left out.

    Args:
        path: The model file.
        certificate: Its certificate; a signature that it has is dropped, as in `embed`.
        key: Signs the certificate.
        is_inside: Whether the file also contains the certificate, without `onnx_sha256` and `onnx_bytes`, which it cannot know.

    Raises:
        ExportError: The certificate is about another model, or the file cannot be written.
    """
    opened = open_model(path)
    _require_same_graph(opened, certificate)
    bound = replace(certificate, content_sha256=opened.digests.content, signature="")
    entries = named_entry(bound.sha256)
    if is_inside:
        entries += certificate_entry(_signed(replace(bound, onnx_sha256="", onnx_bytes=0), key).to_json())
    _write_named(path, entries)
    embedded = open_model(path)
    return _signed(replace(bound, onnx_sha256=embedded.sha256, onnx_bytes=embedded.size_bytes), key)


def _signed(certificate: Certificate, key: SigningKey | None) -> Certificate:
    return certificate if key is None else certificate.signed(key)


def name_of_certificate(model: ModelFile) -> str | None:
    """Return the hash of the certificate that a model names in its metadata; None where it names none."""
    return _entry(model, KEY)


def certificate_of(model: ModelSource | ModelFile) -> Certificate:
    """Return the certificate that a model file contains, or else that lies beside it, after `check_embedded`.

    Raises:
        ExportError: There is none, it cannot be read, or it is not this model's.
    """
    opened = model if isinstance(model, ModelFile) else open_model(model)
    beside = None if opened.path is None else opened.path.parent / CERTIFICATE
    inside, content = _entry(opened, INSIDE), None
    try:
        if inside is not None:
            content = unpacked_certificate(inside.encode())
        elif beside is not None and beside.is_file():
            content = beside.read_bytes()
    except OSError as error:
        raise ExportError(f"cannot read {beside}: {error.strerror or error}") from error
    if content is None:
        raise ExportError(
            f"{opened.name} contains no certificate, and there is no {CERTIFICATE} beside it; convert it again, or compare it "
            "with the float32 model"
        )
    certificate = read_certificate(content)
    check_embedded(opened, certificate)
    return certificate if certificate.onnx_sha256 else certificate.outside(opened.sha256, opened.size_bytes)


def _entry(model: ModelFile, key: str) -> str | None:
    return next((entry.value for entry in model.outline.metadata_props if entry.key == key), None)


def check_embedded(model: ModelSource | ModelFile, certificate: Certificate | None = None) -> None:
    """Check that a model and a certificate name each other; without one, the model and the certificate that it contains.

    Raises:
        ExportError: The model names no certificate or another one, contains none, or the certificate is about another model.
    """
    opened = model if isinstance(model, ModelFile) else open_model(model)
    if certificate is None:
        certificate_of(opened)
        return
    found = name_of_certificate(opened)
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


def _write_named(path: Path, entries: bytes) -> None:
    """Replace a model file by one with these metadata entries about its certificate."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with path.open("rb") as file, temporary.open("wb") as named:
            for start, end in list(unnamed_pieces(file, os.fstat(file.fileno()).st_size)):
                file.seek(start)
                named.writelines(_pieces(file, end - start))
            named.write(entries)
            named.flush()
            os.fsync(named.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise ExportError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _pieces(file: BinaryIO, length: int) -> Iterable[bytes]:
    while length > 0 and (piece := file.read(min(PIECE_BYTES, length))):
        length -= len(piece)
        yield piece


def _require_same_graph(model: ModelSource | ModelFile, certificate: Certificate) -> None:
    if certificate.graph_sha256 and graph_sha256(model) != certificate.graph_sha256:
        raise ExportError("the certificate belongs to another model: its graph_sha256 differs; verify this one")
