"""The parts of a certificate that are not about one output on the user's samples."""

from __future__ import annotations

from dataclasses import dataclass

from export.certificate.figures import Figures


@dataclass(frozen=True, kw_only=True)
class LevelVerdict:
    """How one graph optimisation level of one execution provider takes the model.

    Attributes:
        provider: The execution provider, such as "CPUExecutionProvider".
        level: The level, by its name in `onnxruntime.GraphOptimizationLevel`.
        trouble: What happened, such as "killed by SIGSEGV", a refusal or what is over budget; None when all is well.
        max_scaled_error: The largest of all outputs; None where nothing could be compared.
    """

    provider: str
    level: str
    trouble: str | None = None
    max_scaled_error: float | None = None


@dataclass(frozen=True, kw_only=True)
class AdversarialVerdict:
    """One output on one adversarial batch (see `export.verification.adversarial`).

    Attributes:
        case: The batch's name, such as "zeros".
        execution: As in `OutputVerdict`.
        output: The output's name; empty where the whole batch was not judged or failed.
        figures: Its distance from the reference, where there is one.
        violations: What is over the adversarial budget, in words.
        note: Why it was not judged, such as a reference that is beyond float16 itself.
        factor: How many times larger than the user's samples its floats are; such a case counts towards headroom only.
    """

    case: str
    execution: str
    output: str
    figures: Figures | None = None
    violations: tuple[str, ...] = ()
    note: str | None = None
    factor: float | None = None


@dataclass(frozen=True, kw_only=True)
class Plot:
    """What an output's plots are drawn from.

    Attributes:
        reference: Some of the reference's values, at most 300: those with the largest errors, the largest ones, and others
            spread evenly over the output; finite ones only.
        candidate: The model's values at the same places.
        edges: Edges of the histogram's bins: log10 of the error in units of the output's scale.
        counts: Values in each bin; one fewer than edges. Errors below the first edge, and of 0, are in the first bin.
    """

    reference: tuple[float, ...]
    candidate: tuple[float, ...]
    edges: tuple[float, ...]
    counts: tuple[int, ...]
