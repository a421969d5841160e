"""The certificate of a converted model: what was compared, the figures, the limits and the verdict, as JSON."""

from __future__ import annotations

import json
import math
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from itertools import repeat
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from halfserve.export.certificate.verdicts import LevelVerdict, PrecisionVerdict, Probe
from halfserve.export.export_errors import ExportError, UsageError
from halfserve.export.half_types import HalfName
from halfserve.protos.captured_requests import SampledTraffic
from halfserve.protos.certificate_signature import CertificateKeyError, SigningKey
from halfserve.protos.certificates import SCHEMA, certificate_sha256

# Raised where readers of the number before would misunderstand a certificate. A new field with a default does not raise it: add
# the field to its dataclass, and nothing else. Readers ignore fields that they do not know, with a note; hashes and signatures
# cover the fields that a file has.
SCHEMA_VERSION = 7


@dataclass(frozen=True, kw_only=True)
class Certificate(PrecisionVerdict):
    """The verdicts on one ONNX file: its own, and those in further precisions.

    Attributes:
        model: The model's name.
        precision: The type that the certificate's own verdict is about, "float16" or "bfloat16": that of the file, where the
            file was judged in it. Certificates without it are about float16.
        precisions: The verdicts on the same file where its half-precision nodes and weights are computed in other types.
        onnx_sha256: SHA-256 of the file in hexadecimal; the certificate holds for these bytes only. For a model with data
            files, see `halfserve.export.onnx_files.model_file.ModelFile.sha256`. Empty in a certificate inside the file.
        onnx_bytes: Size of the file and its data files in bytes; 0 in a certificate inside the file.
        content_sha256: SHA-256 of the file without the entries of its metadata about a certificate, where it has some.
        graph_sha256: SHA-256 of the model's content, independent of its storage (see `certificate.embed.graph_sha256`).
        files: SHA-256 of the other files of the model's version that its answers depend on, such as the float32 twin, by path
            in the version's folder.
        settings: Settings of the model's config.pbtxt that change the meaning of its answers, by path (see
            `halfserve.protos.certificates.bound_settings`); None for a file without one, and in older certificates.
        reference_bytes: Size of the float32 model as ONNX, where known.
        samples: Count of compared samples.
        traffic: The captured requests that the samples are; None for other samples.
        sizes: The sizes that were tried of each dimension whose size may vary, the batch's left out, by its name; the samples'
            own first, then longer ones. Empty where no dimension varies, and in certificates before version 6.
        probe: The optimisation level at which ONNX Runtime runs the file.
        versions: Versions of the libraries, by name.
        created_utc: Time of the verification in ISO 8601.
        conversion: The conversion's report (`HalfReport.to_json` or `ConversionReport.to_json`), where known.
        levels: Verdicts on the optimisation levels.
        placement: The provider of each node (`Placement.to_json`), if known.
        advice: What made it over budget, where that is known, and what to do; empty within the budget, and in older
            certificates.
        origin: Where the float32 model was fetched from: the address of the `hub`, the name of the `model` there, the
            `revision` that was asked for, and the `commit` that it stood for; empty for a model from a disk.
        signature: The signature of all other fields, in base64 (see `halfserve.protos.certificate_signature`); empty without
            one.
        document: The JSON object that this certificate was read from or signed as, which hashes and signatures cover: it may
            lack fields of today's certificates, or have further ones. None for a new certificate and for a changed copy.
    """

    model: str
    precision: HalfName = "float16"
    precisions: dict[HalfName, PrecisionVerdict] = field(default_factory=dict)
    onnx_sha256: str
    onnx_bytes: int
    content_sha256: str = ""
    graph_sha256: str = ""
    files: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] | None = None
    reference_bytes: int | None = None
    samples: int
    traffic: SampledTraffic | None = None
    sizes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    probe: Probe
    versions: dict[str, str] = field(default_factory=dict)
    created_utc: str
    conversion: dict[str, Any] | None = None
    levels: tuple[LevelVerdict, ...] = ()
    placement: dict[str, Any] | None = None
    advice: str = ""
    origin: dict[str, str] = field(default_factory=dict)
    signature: str = ""
    document: dict[str, Any] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def not_proved(self) -> dict[HalfName, PrecisionVerdict]:
        """The verdicts in further precisions that did not pass."""
        return {name: verdict for name, verdict in self.precisions.items() if not verdict.passed}

    def to_json(self) -> dict[str, Any]:
        """Return the certificate as JSON types, with the fields of the file that it was read from; NaN and infinities are
        strings.
        """
        if self.document is not None:
            return deepcopy(self.document)
        about = {"model": self.model, "precision": self.precision}  # first, for people
        content = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, "passed": self.passed, **about, **asdict(self)}
        del content["document"]
        content["precisions"] = {name: {"passed": each.passed, **asdict(each)} for name, each in self.precisions.items()}
        plain: dict[str, Any] = json_values(content)
        return plain

    @property
    def sha256(self) -> str:
        """SHA-256 in hexadecimal of the certificate without `onnx_sha256`, `onnx_bytes` and `signature`.

        The model's metadata holds it. Writing it there changes the file's hash, so it cannot depend on the latter.
        """
        return certificate_sha256(self.to_json())

    def signed(self, key: SigningKey) -> Certificate:
        """Return a copy with a signature over all other fields; changing a field makes the signature invalid."""
        content = self.to_json()
        signature = key.signature(content)
        return _of_document(replace(self, signature=signature), {**content, "signature": signature})

    def outside(self, onnx_sha256: str, onnx_bytes: int) -> Certificate:
        """Return a certificate that was inside its model's file with the hash and the size of that file, and unsigned."""
        added: dict[str, Any] = {"onnx_sha256": onnx_sha256, "onnx_bytes": onnx_bytes, "signature": ""}
        return _of_document(replace(self, **added), self.to_json() | added)

    def to_bytes(self) -> bytes:
        """Return the certificate as a JSON file."""
        return (json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n").encode()


def signing_key(path: Path | str | None) -> SigningKey | None:
    """Return the Ed25519 private key in a PEM file; None without a path.

    Raises:
        UsageError: The file holds no such key, or the package cryptography is missing.
    """
    try:
        return None if path is None else SigningKey(Path(path))
    except CertificateKeyError as error:
        raise UsageError(str(error)) from error


class BudgetExceeded(ExportError):  # noqa: N818  (named by what happened; the base class says that it is an error)
    """The converted model differs from its reference by more than the budget allows.

    Attributes:
        certificate: The certificate with all figures; its `passed` is False.
        violation: The worst violation and the count of others.
        cause: The cause, where it is known, and its remedy; otherwise the message ends in the general remedy.
    """

    def __init__(self, violation: str, certificate: Certificate, *, cause: str = "", remedy: str = "") -> None:
        super().__init__("; ".join(part for part in (violation, cause or remedy) if part))
        self.violation, self.cause = violation, cause
        self.certificate = certificate


def read_certificate(content: bytes | str) -> Certificate:
    """Read what `Certificate.to_bytes` wrote, in this version or an earlier one.

    A note names the fields that this version does not know. They are ignored, but hashes and signatures cover them.

    Raises:
        ExportError: The content is not JSON, not a certificate, of a newer schema version, or lacks a field.
    """
    try:
        data = json.loads(content)
    except ValueError as error:
        raise ExportError(f"the certificate is not JSON: {error}") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ExportError("this is not a halfserve certificate; expected a certificate.json that `halfserve export` wrote")
    version = data.get("schema_version")
    if version not in range(1, SCHEMA_VERSION + 1):
        raise ExportError(
            f"the certificate has schema version {version}, expected 1 to {SCHEMA_VERSION}; read it with the halfserve "
            "that wrote it"
        )
    unknown: list[str] = []
    values = {name: value for name, value in data.items() if name not in ("schema", "schema_version")}
    try:
        certificate: Certificate = _decoded(Certificate, values, "", unknown)
    except (AttributeError, TypeError, ValueError) as error:
        raise ExportError(f"the certificate is incomplete or damaged: {type(error).__name__} {error}") from error
    except UsageError as error:  # the budget's limits are out of range
        raise ExportError(f"the certificate is incomplete or damaged: {error}") from error
    if unknown:
        names = ", ".join(dict.fromkeys(unknown))
        note = f"this halfserve does not know these fields of the certificate, and ignores them: {names}"
        certificate = replace(certificate, notes=(*certificate.notes, note))
    return _of_document(certificate, data)


def _of_document(certificate: Certificate, document: dict[str, Any]) -> Certificate:
    object.__setattr__(certificate, "document", document)
    return certificate


def _decoded(kind: Any, value: Any, place: str, unknown: list[str]) -> Any:
    """Rebuild a value of a type from JSON: dataclasses, tuples, optional values, and floats that are written as strings.

    Args:
        kind: The type.
        value: The value, as JSON types.
        place: Path of the value in the certificate.
        unknown: Receives the paths of fields that the dataclasses do not have.
    """
    arguments = get_args(kind)
    if value is None:
        return None
    if get_origin(kind) is UnionType:
        return _decoded(next(entry for entry in arguments if entry is not NoneType), value, place, unknown)
    if get_origin(kind) is tuple:
        each = repeat(arguments[0], len(value)) if arguments[-1] is Ellipsis else arguments
        return tuple(_decoded(*pair, place, unknown) for pair in zip(each, value, strict=True))
    if get_origin(kind) is dict:
        return {name: _decoded(arguments[1], entry, f"{place}{name}.", unknown) for name, entry in value.items()}
    if isinstance(kind, type) and is_dataclass(kind):
        hints, names = get_type_hints(kind), {entry.name for entry in fields(kind) if entry.init}
        unknown += [f"{place}{name}" for name in value if name not in names and name != "passed"]
        given = {name: entry for name, entry in value.items() if name in names}
        return kind(**{name: _decoded(hints[name], entry, f"{place}{name}.", unknown) for name, entry in given.items()})
    return float(value) if kind is float and isinstance(value, str) else value


def json_values(value: Any) -> Any:
    """Return a nested value as JSON types: tuples become lists, NaN and infinities strings."""
    if isinstance(value, dict):
        return {name: json_values(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
