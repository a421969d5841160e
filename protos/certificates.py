"""Links between a certificate, a model's version and its configuration, for the stage that writes them and the one that checks.

The certificate contains SHA-256 hashes of the model file and of the files beside it, and the model's metadata contains the hash
of the certificate. To avoid a cycle, the latter hash omits `onnx_sha256` and `onnx_bytes`, and covers `content_sha256` instead:
the hash of the model file without the metadata entries about its certificate. In a repository the certificate is a file beside
the model. A model file outside of one contains its certificate as a further metadata entry, in which `onnx_sha256` is empty and
`onnx_bytes` is 0. A changed weight, number, limit or file breaks
one of these hashes. Somebody with write access to all files can still replace all hashes; only a signature detects that (see
`certificate_signature`).
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any, BinaryIO, TypeAlias

from google.protobuf import json_format

from halfserve.files.onnx_outline import FileWindow, TopLevelField, top_level_fields
from halfserve.files.varint import length_delimited
from halfserve.protos.model_config_pb2 import DataType, ModelConfig, ModelInput

CERTIFICATE = "certificate.json"
SCHEMA = "halfserve.certificate"
# File beside a version's model: a few inputs and their float32 answers, written by numpy.savez. An array's name is one of these
# prefixes and the name of the input or output. `files` of the certificate has the file's hash.
SAMPLES = "samples.npz"
RECORDED_INPUT, RECORDED_OUTPUT = "input/", "output/"
NAME = "halfserve.certificate_sha256"  # the key of the certificate's hash in the model's metadata
INSIDE = "halfserve.certificate"  # the key of the certificate itself, as JSON, deflated (RFC 1950), in base64
MAX_CERTIFICATE_BYTES = 64 << 20
PIECE_BYTES = 1 << 20
# Parameters of config.pbtxt that change what requests or answers mean, and not only how fast or on what they are computed.
BOUND_PARAMETERS = frozenset(
    f"halfserve.{name}" for name in ("constant_inputs", "embedding_dimensions", "label_scores", "padding", "task", "token_ids")
)
Changed: TypeAlias = tuple[str | None, str | None]  # a setting in the certificate and in config.pbtxt; None where it is not set

_METADATA = 14  # ModelProto.metadata_props
_NOT_NAMED = frozenset({"onnx_sha256", "onnx_bytes", "signature"})
_VALUE = 2  # StringStringEntryProto.value


@dataclass(frozen=True, kw_only=True)
class ModelDigests:
    """SHA-256 hashes of a model file, in hexadecimal."""

    file: str  # hash of all its bytes
    content: str  # hash of its bytes without the metadata entries that name or contain a certificate

    def with_data_files(self, data: Mapping[str, str]) -> ModelDigests:
        """Return the hashes of a model with data files, given the hashes of these files by location.

        These are the hashes of the lines that `sha256sum` prints for the model file (called `model`) and for its data files,
        sorted by location, so that they cover all bytes and do not depend on the model file's own name.
        """
        if not data:
            return self
        lines = "".join(f"{digest}  {location}\n" for location, digest in sorted(data.items()))
        file, content = (hashlib.sha256(f"{own}  model\n{lines}".encode()).hexdigest() for own in (self.file, self.content))
        return ModelDigests(file=file, content=content)


def certificate_sha256(certificate: Mapping[str, Any]) -> str:
    """Return the hash of a certificate, given as JSON types, for its model's metadata; in hexadecimal."""
    return hashlib.sha256(_canonical(certificate, without=_NOT_NAMED)).hexdigest()


def signed_bytes(certificate: Mapping[str, Any]) -> bytes:
    """Return the bytes that a signature covers: all fields except the signature, as ASCII JSON with sorted keys."""
    return _canonical(certificate, without=frozenset({"signature"}))


def _canonical(certificate: Mapping[str, Any], *, without: frozenset[str]) -> bytes:
    content = {name: value for name, value in certificate.items() if name not in without}
    return json.dumps(content, sort_keys=True).encode()


def bound_settings(config: ModelConfig) -> dict[str, str]:
    """Return the settings of a config.pbtxt that change the meaning of answers, as texts by their path.

    Instances, queues, batch sizes above 0, runtimes, devices, warm-up and the precision guard are not among them.
    """
    batch = [-1] if config.max_batch_size > 0 else []
    found = {} if batch else {"max_batch_size": "0"}
    for tensor in config.input:
        found[f"input[{tensor.name}]"] = _tensor_text(tensor, batch)
        if tensor.format:
            found[f"input[{tensor.name}].format"] = ModelInput.Format.Name(tensor.format)
        if tensor.allow_ragged_batch:
            found[f"input[{tensor.name}].allow_ragged_batch"] = "true"
    for output in config.output:
        found[f"output[{output.name}]"] = _tensor_text(output, batch)
        if output.label_filename:
            found[f"output[{output.name}].label_filename"] = output.label_filename
    content = json_format.MessageToDict(config, preserving_proto_field_name=True)
    parts = {name: content.get(name) for name in ("batch_input", "batch_output", "model_operations")}
    sequences = content.get("sequence_batching", {})
    parts |= {f"sequence_batching.{name}": sequences.get(name) for name in ("control_input", "state")}
    found |= {path: json.dumps(part, sort_keys=True) for path, part in parts.items() if part}
    given = sorted(BOUND_PARAMETERS & config.parameters.keys())
    return found | {f"parameters.{key}": config.parameters[key].string_value for key in given}


def changed_settings(certified: Mapping[str, str], config: ModelConfig, *, says_batch_size: bool) -> dict[str, Changed]:
    """Return the settings of a config.pbtxt that differ from those of a certificate, by path.

    Inputs and outputs that it leaves out are those of the model file. So is a `max_batch_size` that it does not say.
    """
    choices = [config]
    if not says_batch_size:
        batched = ModelConfig()
        batched.CopyFrom(config)
        batched.max_batch_size = 1
        choices.append(batched)
    return min((_changes(certified, bound_settings(choice)) for choice in choices), key=len)


def _changes(certified: Mapping[str, str], now: Mapping[str, str]) -> dict[str, Changed]:
    pairs = {name: (certified.get(name), now.get(name)) for name in sorted({*certified, *now})}
    differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if "max_batch_size" not in certified:
        differing.pop("max_batch_size", None)  # without batches, whole shapes mean the same
    return {name: pair for name, pair in differing.items() if name in now or not name.endswith("]")}


def _tensor_text(tensor: Any, batch: list[int]) -> str:
    """Describe type and shape in the model, batch dimension included, and the shape that clients see where it is another."""
    dims = list(tensor.dims)
    own = list(tensor.reshape.shape) if tensor.HasField("reshape") else dims
    shown = "" if own == dims or (not own and dims == [1]) else f", {batch + dims} for clients"
    return f"{DataType.Name(tensor.data_type)} {batch + own}{shown}"


def metadata_entry(key: str, value: str) -> bytes:
    """Return an entry of a model's metadata, as bytes that may be appended to a model file."""
    content = value.encode()
    body = _key_field(key) + length_delimited(_VALUE, len(content)) + content
    return length_delimited(_METADATA, len(body)) + body


def named_entry(digest: str) -> bytes:
    """Return the metadata entry that names a certificate."""
    return metadata_entry(NAME, digest)


def certificate_entry(content: Mapping[str, Any]) -> bytes:
    """Return the metadata entry that contains a certificate, given as JSON types."""
    packed = zlib.compress(json.dumps(content, allow_nan=False, separators=(",", ":")).encode(), 9)
    return metadata_entry(INSIDE, base64.b64encode(packed).decode())


def unpacked_certificate(value: bytes) -> bytes:
    """Return the JSON in the value of such an entry; the value itself where it is another, which is no JSON."""
    try:
        stream = zlib.decompressobj()
        content = stream.decompress(base64.b64decode(value, validate=True), MAX_CERTIFICATE_BYTES)
    except (ValueError, zlib.error):
        return value
    return content if stream.eof else value


def _key_field(key: str) -> bytes:
    """StringStringEntryProto.key, which every writer puts first."""
    return length_delimited(1, len(key)) + key.encode()


def _entries(window: FileWindow) -> Iterator[tuple[str, TopLevelField, int]]:
    """Yield the metadata entries about a certificate in a model file: key, place, and where the value's field begins."""
    for field in top_level_fields(window):
        for key in (NAME, INSIDE):
            head = field.body + len(_key_field(key))
            if field.number == _METADATA and head <= field.end and window.piece(field.body, head) == _key_field(key):
                yield key, field, head


def unnamed_pieces(file: BinaryIO, size: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges (start, end) of a model file between the metadata entries about its certificate, in order.

    Raises:
        DamagedFileError: the file is no protobuf message, or ends within one.
        OSError: the file cannot be read.
    """
    start = 0
    for _, field, _ in _entries(FileWindow(file, size)):
        yield start, field.start
        start = field.end
    yield start, size


def certificate_inside(file: BinaryIO, size: int) -> bytes | None:
    """Return the certificate that a model file contains, as JSON; None if it contains none.

    Raises:
        DamagedFileError: the file is no protobuf message, or ends within one.
        OSError: the file cannot be read.
    """
    window, found = FileWindow(file, size), None
    for key, field, head in _entries(window):
        if key == INSIDE:
            found = window.piece(head, min(field.end, head + MAX_CERTIFICATE_BYTES))
    if found is None:
        return None
    value = next((field for field in top_level_fields(FileWindow(BytesIO(found), len(found))) if field.number == _VALUE), None)
    return b"" if value is None else unpacked_certificate(found[value.body : value.end])


def model_digests(file: BinaryIO, size: int) -> ModelDigests:
    """Return the hashes of a model file.

    Args:
        file: the ONNX file, seekable.
        size: size of the file in bytes.

    Raises:
        DamagedFileError: the file is no protobuf message, or ends within one.
        OSError: the file cannot be read.
    """
    whole, content, position = hashlib.sha256(), hashlib.sha256(), 0
    for number, (start, end) in enumerate(list(unnamed_pieces(file, size))):
        _feed(file, position, start, whole)
        if number == 0:  # most files end with the entry, so that both hashes cover the same bytes up to there
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
