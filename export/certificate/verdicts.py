"""Verdicts of a verification: on outputs, adversarial samples, optimisation levels and precisions, with their figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from halfserve.export.certificate.budget import NO_HEADROOM, Budget, ErrorFigures
from halfserve.export.half_types import FP16_MAX


@dataclass(frozen=True, kw_only=True)
class LevelVerdict:
    """The result of running the model at one graph optimisation level.

    Attributes:
        provider: The execution provider, such as "CPUExecutionProvider".
        level: The level, a name in `onnxruntime.GraphOptimizationLevel`.
        trouble: "killed by SIGSEGV", a refusal, or the first violation of the budget; None for a sound level.
        max_scaled_error: The largest over all outputs; None where nothing could be compared.
    """

    provider: str
    level: str
    trouble: str | None = None
    max_scaled_error: float | None = None


@dataclass(frozen=True, kw_only=True)
class AdversarialVerdict:
    """One output on one adversarial batch (see `halfserve.export.verification.generated.adversarial`).

    Attributes:
        case: The batch's name, such as "zeros".
        execution: The execution, as in `OutputVerdict`.
        output: The output's name; empty where the whole batch failed or was not judged.
        figures: Error figures, where the output could be compared.
        violations: The limits of the adversarial budget that are exceeded.
        note: Why the case was not judged, such as a reference whose own answer exceeds float16's range.
        factor: How many times the batch's floats exceed the user's; set for cases that measure headroom.
    """

    case: str
    execution: str
    output: str
    figures: ErrorFigures | None = None
    violations: tuple[str, ...] = ()
    note: str | None = None
    factor: float | None = None


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Data of an output's scatter plot and error histogram.

    Attributes:
        reference: At most 300 finite values of the reference: those with the largest errors, the largest magnitudes, and an
            even selection of the others.
        candidate: The converted model's values at the same places.
        edges: Edges of the histogram's bins: log10(error / unit of the output).
        counts: Values per bin, one fewer than edges. Errors below the first edge count in the first bin.
    """

    reference: tuple[float, ...]
    candidate: tuple[float, ...]
    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Probe:
    """At which graph optimisation level ONNX Runtime runs the model soundly.

    Attributes:
        level: The highest sound level, a name in `onnxruntime.GraphOptimizationLevel`.
        crashes: The failures at higher levels, such as "ORT_ENABLE_ALL: killed by SIGSEGV".
    """

    level: str
    crashes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Risk:
    """A node whose inner sum can exceed float16's range.

    Attributes:
        node: Name of the node.
        op_type: Operator of the node.
        what: The sum's name, such as "sum of squares".
        reach: Upper bound of every partial sum on the samples.
        module: The torch module that the node comes from, where known.
    """

    node: str
    op_type: str
    what: str
    reach: float
    module: str | None = None

    def __str__(self) -> str:
        place = f" ({self.module})" if self.module else ""
        return (
            f"{self.op_type} {self.node!r}{place}: its {self.what} reaches {self.reach:.3g} inside, over float16's {FP16_MAX:g}"
        )


@dataclass(frozen=True)
class TaskFigure:
    """A figure in the terms of the model's task, such as the share of nearest neighbours that stay.

    Attributes:
        name: The figure's name.
        value: The figure; larger is better.
        least: The limit.
    """

    name: str
    value: float
    least: float

    @property
    def violation(self) -> str | None:
        """The text of a figure that is under its limit, or NaN."""
        return None if self.value >= self.least else f"{self.name} {self.value:.6g} (least {self.least:g})"


@dataclass(frozen=True, kw_only=True)
class OutputVerdict:
    """One output in one execution of the model.

    Attributes:
        name: The output's name in the ONNX model.
        execution: "rounded" (rounding after every node, which simulates half-precision hardware), "cuda" (rounding inside nodes
            too, as ONNX Runtime's CUDA kernels do; absent where they do not, and for the target "cpu"), "runtime" (ONNX
            Runtime's CPU provider) or "gpu" (its CUDA provider, where there is a GPU). Before version 7, "cuda" was the latter.
        figures: Error figures against the reference.
        violations: The limits of the budget that are exceeded.
        plot: Data of the plots.
        task: Figures of the model's task; empty where it has none, or the argmax is what counts.
    """

    name: str
    execution: str
    figures: ErrorFigures
    violations: tuple[str, ...]
    plot: Plot | None = None
    task: tuple[TaskFigure, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Share of labels that equal the argmax, for the reference and for the converted model in two executions."""

    reference: float
    rounded: float
    runtime: float


@dataclass(frozen=True, kw_only=True)
class PrecisionVerdict:
    """The verdict on a model that computes in one half-precision type.

    Attributes:
        budget: The limits.
        outputs: Verdicts on every output in every execution.
        accuracy: Present where labels were given.
        adversarial: Verdicts on the adversarial samples.
        headroom: Largest tested factor by which inputs may exceed the user's samples; None where it was not measured: the
            model has no floating input, or no larger input could be judged.
        accumulators: Accumulator type of the target runtime: "float32", or "float16", where `risks` are over budget.
        risks: Nodes whose inner sums exceed float16's range although their results do not.
        notes: Comparisons that were not possible, with reasons.
    """

    budget: Budget
    outputs: tuple[OutputVerdict, ...]
    accuracy: Accuracy | None = None
    adversarial: tuple[AdversarialVerdict, ...] = ()
    headroom: float | None = None
    accumulators: str = "float32"
    risks: tuple[Risk, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def violations(self) -> list[str]:
        """Everything that is over budget, with output and execution."""
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
    def failures(self) -> list[str]:
        """What is over budget, said once for each output: its first run over budget in full, the others by name."""
        texts: dict[str, list[str]] = {}
        others: dict[str, list[str]] = {}
        over = [(o.name, o.execution, f" ({o.execution})", o.violations) for o in self.outputs if o.violations]
        over += [
            (line.output, f"on {line.case}", f" on {line.case} ({line.execution})", line.violations)
            for line in self.adversarial
            if line.factor is None and line.violations
        ]
        for name, run, place, violations in over:
            if name not in texts:
                start = f"output {name!r}{place}" if name else place.strip()
                texts[name], others[name] = [f"{start}: {text}" for text in violations], [run]
            elif run not in others[name]:
                others[name].append(run)
        for name, (_, *further) in others.items():
            texts[name][-1] += f"; over budget too: {', '.join(further)}" if further else ""
        known = sum(len(violations) for *_, violations in over)
        return [*(text for found in texts.values() for text in found), *self.violations[known:]]

    @property
    def worst_violation(self) -> str:
        """The first violation, and how many more there are; or that nothing was compared."""
        found = self.violations
        if not found:
            return "no output holds a number that was compared, so nothing is proved; give samples with such answers"
        return found[0] + (f" (and {len(found) - 1} more over budget)" if len(found) > 1 else "")

    @property
    def passed(self) -> bool:
        """Whether outputs were compared and all are within the budget."""
        return anything_compared(self.outputs) and not self.violations


def anything_compared(outputs: Sequence[OutputVerdict]) -> bool:
    """Return whether any element was compared; where there are floating outputs, whether one of their elements was.

    An output that float32 itself mostly answers with NaN was not.
    """
    floating = [verdict for verdict in outputs if verdict.figures.floating]
    return any(verdict.figures.elements and not verdict.figures.mostly_nan for verdict in floating or outputs)
