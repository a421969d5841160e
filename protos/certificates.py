"""How a certificate and the files of a model's version name each other, for the stage that writes them and the one that checks.

The certificate holds SHA-256 hashes of the model file and of the files beside it, and the model's metadata holds the hash of
the certificate. To avoid a cycle, the latter omits `onnx_sha256` and `onnx_bytes`, and covers `content_sha256` instead: the
hash of the model file without the entry of its metadata that names the certificate. A changed weight, figure, limit or file
breaks one of these. Somebody who may write all of the files can still replace all of the hashes; that shows only by a
signature (see `certificate_signature`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from halfserve.files.onnx_outline import FileWindow, top_level_fields
from halfserve.files.varint import encoded_varint, length_delimited

CERTIFICATE = "certificate.json"
SCHEMA = "halfserve.certificate"
# Beside a version's model: a few inputs and their float32 answers, as numpy.savez writes them. An array's name is one of these
# prefixes with the name of the input or output behind. `files` of the certificate holds the hash.
SAMPLES = "samples.npz"
RECORDED_INPUT, RECORDED_OUTPUT = "input/", "output/"
NAME = "halfserve.certificate_sha256"  # the key in the model's metadata
PIECE_BYTES = 1 << 20

_METADATA = 14  # ModelProto.metadata_props
_NOT_NAMED = frozenset({"onnx_sha256", "onnx_bytes", "signature"})
_NAME_FIELD = length_delimited(1, len(NAME)) + NAME.encode()  # StringStringEntryProto.key


@dataclass(frozen=True, kw_only=True)
class ModelDigests:
    """SHA-256 hashes of a model file, in hexadecimal.

    Attributes:
        file: of its bytes.
        content: of its bytes without the entries of its metadata that name a certificate.
    """

    file: str
    content: str

    def with_data_files(self, data: Mapping[str, str]) -> ModelDigests:
        """Return the hashes of a model with data files, given the hashes of these by location.

        These are the hashes of the lines that `sha256sum` prints for the model file (called `model`) and for its data files,
        sorted by location, so that they cover all bytes and do not depend on the model file's own name.
        """
        if not data:
            return self
        lines = "".join(f"{digest}  {location}\n" for location, digest in sorted(data.items()))
        file, content = (hashlib.sha256(f"{own}  model\n{lines}".encode()).hexdigest() for own in (self.file, self.content))
        return ModelDigests(file=file, content=content)


def certificate_sha256(certificate: Mapping[str, Any]) -> str:
    """The hash of a certificate, as JSON types, that its model's metadata holds, in hexadecimal."""
    return hashlib.sha256(_canonical(certificate, without=_NOT_NAMED)).hexdigest()


def signed_bytes(certificate: Mapping[str, Any]) -> bytes:
    """What a signature covers: all fields but the signature, as JSON in ASCII with sorted keys."""
    return _canonical(certificate, without=frozenset({"signature"}))


def _canonical(certificate: Mapping[str, Any], *, without: frozenset[str]) -> bytes:
    content = {name: value for name, value in certificate.items() if name not in without}
    return json.dumps(content, sort_keys=True).encode()


def named_entry(digest: str) -> bytes:
    """The entry of a model's metadata that names a certificate, as bytes that may be appended to a model file."""
    body = _NAME_FIELD + length_delimited(2, len(digest)) + digest.encode()
    return encoded_varint(_METADATA << 3 | 2) + encoded_varint(len(body)) + body


def unnamed_pieces(file: BinaryIO, size: int) -> Iterator[tuple[int, int]]:
    """The ranges (start, end) of a model file between the entries that name a certificate, in order.

    Raises:
        DamagedFileError: the file is no protobuf message, or ends within one.
        OSError: the file cannot be read.
    """
    window, start = FileWindow(file, size), 0
    for field in top_level_fields(window):
        head = field.body + len(_NAME_FIELD)
        if field.number == _METADATA and head <= field.end and window.piece(field.body, head) == _NAME_FIELD:
            yield start, field.start
            start = field.end
    yield start, size


def model_digests(file: BinaryIO, size: int) -> ModelDigests:
    """The hashes of a model file.

    Args:
        file: the ONNX file, seekable.
        size: of the file, in bytes.

    Raises:
        DamagedFileError: the file is no protobuf message, or ends within one.
        OSError: the file cannot be read.
    """
    whole, content, position = hashlib.sha256(), hashlib.sha256(), 0
    for number, (start, end) in enumerate(list(unnamed_pieces(file, size))):
        _feed(file, position, start, whole)
        if number == 0:  # most files end with the entry, so that both hashes are of the same bytes up to there
            _feed(file, start, end, whole)
            content = whole.copy()
        else:
            _feed(file, start, end, whole, content)
        position = end
    return ModelDigests(file=whole.hexdigest(), content=content.hexdigest())


def _feed(file: BinaryIO, start: int, end: int, *hashes: Any) -> None:
    file.seek(start)
    while start < end:
        piece = file.read(min(PIECE_BYTES, end - start))
        if not piece:
            raise OSError(f"it became shorter than {end} bytes while it was read")
        for each in hashes:
            each.update(piece)
        start += len(piece)
