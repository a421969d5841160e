"""The proof that travels with a model: what was compared, how far apart it was, and what was allowed."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from export.certificate.budget import NO_HEADROOM, Budget
from export.certificate.figures import Figures, Kind, Vanished
from export.certificate.probe import Probe
from export.certificate.risk import Risk
from export.certificate.verdicts import AdversarialVerdict, LevelVerdict, Plot
from export.errors import ExportError, UsageError

SCHEMA = "halfserve.certificate"
SCHEMA_VERSION = 3
READABLE_VERSIONS = (1, 2, 3)


@dataclass(frozen=True, kw_only=True)
class OutputVerdict:
    """One output under one way of execution.

    Attributes:
        name: The output's name in the ONNX model.
        execution: "rounded": float16 after every node, as a GPU computes. "runtime": as ONNX Runtime's CPU provider computes.
            "cuda": as its CUDA provider does, where there is a GPU.
        figures: Its distance from the reference.
        violations: What is over budget, in words.
        plot: What its plots are drawn from.
    """

    name: str
    execution: str
    figures: Figures
    violations: tuple[str, ...]
    plot: Plot | None = None


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
        onnx_sha256: SHA-256 of the file, in hexadecimal: the certificate holds for these bytes only. For a model with data
            files, see `export.files.model_file.ModelFile.sha256`.
        onnx_bytes: Size of the file and its data files in bytes.
        graph_sha256: SHA-256 of the model however it is stored, without the entries of its metadata that name a certificate
            (see `export.certificate.embed.graph_sha256`).
        reference_bytes: Size of the float32 model as ONNX, where known.
        samples: How many samples were compared.
        budget: The limits.
        outputs: Figures for every output, under both ways of execution.
        accuracy: Where labels were given.
        probe: At which optimisation level ONNX Runtime opens the file, and which levels crash it.
        versions: Versions of the libraries, by name.
        created_utc: When, in ISO 8601.
        conversion: What the conversion did (`HalfReport.to_json` or `ConversionReport.to_json`), where known.
        levels: How each optimisation level takes the model.
        adversarial: Figures on samples at the edge of the user's.
        headroom: How many times larger than the user's samples inputs may grow before something breaks, as far as was tried;
            None where it was not measured: nothing floating goes in, or no larger input could be judged.
        accumulators: In which type the runtime that the certificate is for sums: "float32", or "float16", and then `risks`
            are over budget.
        risks: Nodes in which a sum outgrows float16 although the result does not.
        notes: What could not be compared, and why.
        placement: Which provider runs what (`Placement.to_json`), where known.
    """

    model: str
    onnx_sha256: str
    onnx_bytes: int
    graph_sha256: str = ""
    reference_bytes: int | None = None
    samples: int
    budget: Budget
    outputs: tuple[OutputVerdict, ...]
    accuracy: Accuracy | None = None
    probe: Probe
    versions: dict[str, str] = field(default_factory=dict)
    created_utc: str
    conversion: dict[str, Any] | None = None
    levels: tuple[LevelVerdict, ...] = ()
    adversarial: tuple[AdversarialVerdict, ...] = ()
    headroom: float | None = None
    accumulators: str = "float32"
    risks: tuple[Risk, ...] = ()
    notes: tuple[str, ...] = ()
    placement: dict[str, Any] | None = None

    @property
    def violations(self) -> list[str]:
        """Everything that is over budget, each with its output and way of execution."""
        found = [f"output {o.name!r} ({o.execution}): {text}" for o in self.outputs for text in o.violations]
        for line in self.adversarial:
            if line.factor is None:
                place = f"output {line.output!r} " if line.output else ""
                found += [f"{place}on {line.case} ({line.execution}): {text}" for text in line.violations]
        if (self.headroom or 1.0) < self.budget.min_headroom:
            measured = NO_HEADROOM if self.headroom is None else f"headroom {self.headroom:g}"
            found.append(f"{measured} (least {self.budget.min_headroom:g})")
        if self.accumulators == "float16":
            found += [str(risk) for risk in self.risks]
        return found

    @property
    def passed(self) -> bool:
        """Whether outputs were compared, and all of them are within the budget."""
        return anything_compared(self.outputs) and not self.violations

    def to_json(self) -> dict[str, Any]:
        """The certificate as JSON's own types; NaN and infinities are strings, which JSON's numbers cannot be."""
        content = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, "passed": self.passed, **asdict(self)}
        plain: dict[str, Any] = _plain(content)
        return plain

    @property
    def sha256(self) -> str:
        """SHA-256 of the certificate without `onnx_sha256` and `onnx_bytes`, in hexadecimal: what the model's metadata holds.

        The file that holds this number has another hash than before, so the number cannot depend on that hash.
        """
        content = {name: value for name, value in self.to_json().items() if name not in ("onnx_sha256", "onnx_bytes")}
        return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()

    def to_bytes(self) -> bytes:
        """The certificate as a JSON file."""
        return (json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n").encode()


def anything_compared(outputs: Sequence[OutputVerdict]) -> bool:
    """Whether outputs hold an element that was compared; where some are floating, one of those, which float16 can harm."""
    floating = [verdict for verdict in outputs if verdict.figures.floating]
    return any(verdict.figures.elements for verdict in floating or outputs)


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
    if data.get("schema_version") not in READABLE_VERSIONS:
        raise ExportError(f"the certificate has schema version {data.get('schema_version')}, expected 1 to 3")
    try:
        return _from_json(data)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ExportError(f"the certificate is incomplete or damaged: {type(error).__name__} {error}") from error
    except UsageError as error:  # a budget that nobody could have asked for
        raise ExportError(f"the certificate is incomplete or damaged: {error}") from error


def _from_json(data: dict[str, Any]) -> Certificate:
    values = {name: value for name, value in data.items() if name not in ("schema", "schema_version", "passed")}
    values["outputs"] = tuple(_output(entry) for entry in data["outputs"])
    values["budget"] = Budget(**data["budget"])
    values["accuracy"] = data["accuracy"] and Accuracy(**_numbers(data["accuracy"]))
    values["probe"] = Probe(level=data["probe"]["level"], crashes=tuple(data["probe"]["crashes"]))
    levels = (("max_scaled_error", entry) for entry in data.get("levels", ()))
    values["levels"] = tuple(LevelVerdict(**{**entry, name: _number(entry[name])}) for name, entry in levels)
    values["adversarial"] = tuple(_adversarial(entry) for entry in data.get("adversarial", ()))
    values["risks"] = tuple(Risk(**{**entry, "reach": _number(entry["reach"])}) for entry in data.get("risks", ()))
    values["notes"] = tuple(data.get("notes", ()))
    return Certificate(**values)


def _output(entry: dict[str, Any]) -> OutputVerdict:
    plot = entry.get("plot")
    return OutputVerdict(
        name=entry["name"],
        execution=entry["execution"],
        figures=_figures(entry["figures"]),
        violations=tuple(entry["violations"]),
        plot=plot and Plot(**{name: tuple(values) for name, values in plot.items()}),
    )


def _adversarial(entry: dict[str, Any]) -> AdversarialVerdict:
    figures = entry["figures"] and _figures(entry["figures"])
    return AdversarialVerdict(**{**entry, "figures": figures, "violations": tuple(entry["violations"])})


def _figures(entry: dict[str, Any]) -> Figures:
    gone = entry.get("vanished")
    return Figures(
        **_numbers({name: value for name, value in entry.items() if name not in ("kinds", "vanished")}),
        kinds=tuple(_kind(kind) for kind in entry.get("kinds", ())),
        vanished=gone and Vanished(**_numbers(gone)),
    )


def _kind(entry: dict[str, Any]) -> Kind:
    return Kind(**{**_numbers(entry), "columns": tuple((first, last) for first, last in entry["columns"])})


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _numbers(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: _number(value) for name, value in entry.items()}


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str) else value
