"""The proof that travels with a model: what was compared, how far apart it was, and what was allowed."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

from export.errors import ExportError
from export.verification.budget import Budget
from export.verification.metrics import Figures
from export.verification.sessions import Probe

SCHEMA = "halfserve.certificate"
SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class OutputVerdict:
    """One output under one way of execution.

    Attributes:
        name: The output's name in the ONNX model.
        execution: "rounded": float16 after every node, as a GPU computes. "runtime": as ONNX Runtime's CPU provider computes.
        figures: Its distance from the reference.
        violations: What is over budget, in words.
    """

    name: str
    execution: str
    figures: Figures
    violations: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Share of labels that the argmax meets: the reference's, and the fp16 model's under the two ways of execution."""

    reference: float
    rounded: float
    runtime: float


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """The verdict on one ONNX file.

    Attributes:
        model: The model's name.
        onnx_sha256: SHA-256 of the file, in hexadecimal: the certificate holds for these bytes only.
        onnx_bytes: Size of the file in bytes.
        reference_bytes: Size of the float32 model as ONNX, where known.
        samples: How many samples were compared.
        budget: The limits.
        outputs: Figures for every output, under both ways of execution.
        accuracy: Where labels were given.
        probe: At which optimisation level ONNX Runtime opens the file, and which levels crash it.
        versions: Versions of the libraries, by name.
        created_utc: When, in ISO 8601.
        conversion: What `to_half` did (`HalfReport.to_json`), where known.
    """

    model: str
    onnx_sha256: str
    onnx_bytes: int
    reference_bytes: int | None = None
    samples: int
    budget: Budget
    outputs: tuple[OutputVerdict, ...]
    accuracy: Accuracy | None = None
    probe: Probe
    versions: dict[str, str] = field(default_factory=dict)
    created_utc: str
    conversion: dict[str, Any] | None = None

    @property
    def violations(self) -> list[str]:
        """Everything that is over budget, each with its output and way of execution."""
        return [f"output {o.name!r} ({o.execution}): {text}" for o in self.outputs for text in o.violations]

    @property
    def passed(self) -> bool:
        """Whether there are outputs, and all of them are within the budget."""
        return bool(self.outputs) and not self.violations

    def to_json(self) -> dict[str, Any]:
        """The certificate as JSON's own types; NaN and infinities are strings, which JSON's numbers cannot be."""
        content = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, "passed": self.passed, **asdict(self)}
        plain: dict[str, Any] = _plain(content)
        return plain

    def to_bytes(self) -> bytes:
        """The certificate as a JSON file."""
        return (json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n").encode()


class BudgetExceeded(ExportError):  # noqa: N818  (named by what happened; the base class says that it is an error)
    """The fp16 model differs from its reference by more than the budget allows.

    Attributes:
        certificate: All figures, the ones within their limits included; its `passed` is False.
    """

    def __init__(self, message: str, certificate: Certificate) -> None:
        super().__init__(message)
        self.certificate = certificate


def read_certificate(content: bytes | str) -> Certificate:
    """Read what `Certificate.to_bytes` wrote.

    Raises:
        ExportError: It is no JSON, no certificate, one of a newer schema, or lacks a field.
    """
    try:
        data = json.loads(content)
    except ValueError as error:
        raise ExportError(f"the certificate is no JSON: {error}") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ExportError("this is no halfserve certificate; expected a certificate.json that `halfserve export` wrote")
    if data.get("schema_version") != SCHEMA_VERSION:
        raise ExportError(f"the certificate has schema version {data.get('schema_version')}, expected {SCHEMA_VERSION}")
    try:
        return _from_json(data)
    except (KeyError, TypeError, ValueError) as error:
        raise ExportError(f"the certificate is incomplete or damaged: {type(error).__name__} {error}") from error


def _from_json(data: dict[str, Any]) -> Certificate:
    outputs = tuple(
        OutputVerdict(
            name=entry["name"],
            execution=entry["execution"],
            figures=Figures(**{name: _number(value) for name, value in entry["figures"].items()}),
            violations=tuple(entry["violations"]),
        )
        for entry in data["outputs"]
    )
    values = {name: value for name, value in data.items() if name not in ("schema", "schema_version", "passed")}
    values["outputs"] = outputs
    values["budget"] = Budget(**data["budget"])
    values["accuracy"] = data["accuracy"] and Accuracy(**{name: _number(v) for name, v in data["accuracy"].items()})
    values["probe"] = Probe(level=data["probe"]["level"], crashes=tuple(data["probe"]["crashes"]))
    return Certificate(**values)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str) else value
