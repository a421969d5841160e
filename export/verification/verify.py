"""Is this fp16 model still the model it was made from? Run both on the same samples and judge the difference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import numpy as np

from export.certificate.budget import Budget
from export.certificate.certificate import Accuracy, BudgetExceeded, Certificate
from export.certificate.embed import graph_sha256
from export.certificate.risk import Risk
from export.errors import ExportError
from export.files.model_file import ModelFile, ModelSource, open_model
from export.verification.adversarial import Case, adversarial_cases
from export.verification.advice import advice
from export.verification.children import Answer, Children, Value
from export.verification.comparison import Comparison
from export.verification.edge_cases import headroom, judge_cases
from export.verification.executions import gpu_is_there, run_simulated
from export.verification.feeds import Inputs, Values, as_array, make_feeds, require_finite
from export.verification.interface import inputs_of
from export.verification.judging import judge
from export.verification.levels import Runtime, run_levels
from export.verification.metrics import Array
from export.verification.own_noise import allow_own_noise
from export.verification.steepness import steepness
from export.verification.ties import settle_ties
from export.verification.vanishing import remedy
from export.verification.versions import versions

if TYPE_CHECKING:
    from torch import nn

Accumulators: TypeAlias = Literal["float32", "float16"]
UNASKED_SHOWN = 20


class Report(Protocol):
    """What a conversion reported."""

    def to_json(self) -> dict[str, Any]:
        """The report as JSON's own types."""


def verify(
    reference: nn.Module | ModelSource | ModelFile,
    candidate: ModelSource | ModelFile,
    inputs: Inputs,
    *,
    budget: Budget | None = None,
    labels: Values | None = None,
    batch_size: int = 32,
    name: str = "model",
    reference_bytes: int | None = None,
    conversion: Report | None = None,
    adversarial: bool = True,
    longest: Mapping[str, int] | None = None,
    source: ModelSource | ModelFile | None = None,
    accumulators: Accumulators = "float32",
    placement: Mapping[str, Any] | None = None,
    cuda: bool | None = None,
    notes: Sequence[str] = (),
) -> Certificate:
    """Compare an fp16 ONNX model with its float32 reference, output by output.

    ONNX models run in child processes: a crash, a hang or a refusal is recorded, never ours. The candidate runs rounded to
    float16 after every node, as a GPU computes it (see `export.verification.simulate`), as ONNX Runtime's CPU provider takes it
    at its highest optimisation level that is sound, and on a GPU where there is one. All must be within the budget. The lower
    levels are tried on the first batch.

    Args:
        reference: The float32 torch module in evaluation mode, or a float32 ONNX model.
        candidate: The fp16 ONNX model. A path may have data files beside it and be of any size.
        inputs: Samples in the reference's dtypes: an array for each input, in order or by name, whose first dimension counts
            them; for a model without a batch dimension, arrays of its inputs' shapes; or a list of batches, each a mapping.
        budget: The limits; `Budget()` by default.
        labels: The true classes, integers, shaped like the first output without its class axis.
        batch_size: How many samples run at once. A model with a fixed batch runs in that size, and a remainder is left out.
        name: The model's name, for the certificate.
        reference_bytes: Size of the float32 model, for the certificate; known where the reference is ONNX.
        conversion: What the conversion did (`HalfReport` or `ConversionReport`), for the certificate.
        adversarial: Whether to try samples at the edge of the given ones too (see `export.verification.adversarial`).
        source: The float32 ONNX model that the candidate was made from, where the reference is a torch module: it shows where
            the candidate chooses between ties (see `export.verification.ties`).
        longest: Sizes of dynamic dimensions, by name, that the model must bear; tried with `adversarial`.
        accumulators: In which type the target runtime sums. With "float16", sums that outgrow it are over budget, those inside
            matrix products and convolutions too, and a note names nodes whose sums have no bound (see
            `export.verification.accumulators`).
        placement: Which provider runs what (`Placement.to_json`), for the certificate.
        cuda: Whether to run on a GPU; by default where one is there.
        notes: What else the certificate is to say, such as where the samples come from.

    Raises:
        BudgetExceeded: With the worst offence and what to do; the certificate is in it.
        ExportError: A model cannot be read, opened or run on the samples, the two do not answer alike, a sample holds NaN or
            infinity and so does the reference's answer, or headroom is asked for without adversarial samples.
    """
    budget = budget or Budget()
    _require_measurable(budget, adversarial=adversarial)
    opened = candidate if isinstance(candidate, ModelFile) else open_model(candidate)
    wanted = inputs_of(opened.outline)
    feeds = make_feeds(wanted, inputs, batch_size)
    cases = adversarial_cases(wanted, feeds.batches, resizable=feeds.resizable, longest=longest) if adversarial else []
    with Children() as children:
        made_from = source if source is None or isinstance(source, ModelFile) else open_model(source)
        comparison = Comparison(reference, opened, children, feeds, cases, made_from)
        require_finite(feeds.batches, comparison.expected)
        runs = _run(comparison, children, budget, products=accumulators == "float16", cuda=cuda)
        judged = _judged(comparison, cases, runs, budget)
        edge = [line for line in judged["adversarial"] if line.factor is None]
        over = any(verdict.violations for verdict in (*judged["outputs"], *edge))
        if over and budget.max_abs_error is None and (noise := allow_own_noise(comparison, budget)):
            runs = _run(comparison, children, budget, products=accumulators == "float16", cuda=cuda)  # levels are judged too
            judged = _judged(comparison, cases, runs, budget)
            judged["notes"] = (*noise, *judged["notes"])
        steep = steepness(comparison, judged["outputs"], budget)
    certificate = Certificate(
        model=name,
        onnx_sha256=opened.sha256,
        onnx_bytes=opened.size_bytes,
        graph_sha256=graph_sha256(opened),
        reference_bytes=reference_bytes or comparison.reference_bytes,
        samples=feeds.samples,
        budget=budget,
        accuracy=None if labels is None else _accuracies(comparison, runs, as_array(labels)[: feeds.samples]),
        probe=runs.runtime.probe,
        versions=versions(),
        created_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        conversion=None if conversion is None else conversion.to_json(),
        levels=runs.runtime.levels,
        accumulators=accumulators,
        risks=runs.risks,
        placement=None if placement is None else dict(placement),
        **judged | {"notes": (*notes, *comparison.notes, *judged["notes"], *steep.notes)},
    )
    if not certificate.passed:
        of_reference, source = comparison.reference_graph, comparison.reference_path
        vanishing = remedy(opened.outline.graph, of_reference, source, certificate.outputs)
        raise BudgetExceeded(advice(certificate, steep, vanishing), certificate)
    return certificate


def _require_measurable(budget: Budget, *, adversarial: bool) -> None:
    if budget.min_headroom > 1 and not adversarial:
        raise ExportError(
            f"headroom of {budget.min_headroom:g} is asked for, which adversarial samples measure: leave them on or ask for 1"
        )


@dataclass(frozen=True, kw_only=True)
class _Runs:
    """The candidate's answers by way of execution, and what was seen on the way."""

    answers: dict[str, Answer]
    runtime: Runtime
    risks: tuple[Risk, ...]
    notes: tuple[str, ...]


def _run(comparison: Comparison, children: Children, budget: Budget, *, products: bool, cuda: bool | None) -> _Runs:
    runtime = run_levels(comparison, children, budget)  # first: it says best what is wrong with a model that does not open
    usual = len(comparison.expected)
    simulated = run_simulated(comparison.candidate, children, comparison.staged, usual=usual, products=products)
    answers, notes = {"rounded": simulated.answer, "runtime": runtime.answer}, []
    if products and simulated.unasked:
        more = f" and {len(simulated.unasked) - UNASKED_SHOWN} more" if len(simulated.unasked) > UNASKED_SHOWN else ""
        notes.append(f"no bound is known for the sums inside {', '.join(simulated.unasked[:UNASKED_SHOWN])}{more}")
    if gpu_is_there() if cuda is None else cuda:
        on_gpu = comparison.on_cuda()
        if on_gpu is not None:
            answers["cuda"] = on_gpu
        elif cuda:
            raise ExportError("ONNX Runtime cannot use a GPU here; install its CUDA libraries, or leave the GPU out")
        else:
            notes.append("there is a GPU, but ONNX Runtime cannot use it: its CUDA libraries are missing")
    return _Runs(answers=answers, runtime=runtime, risks=simulated.risks, notes=tuple(notes))


def _judged(comparison: Comparison, cases: Sequence[Case], runs: _Runs, budget: Budget) -> dict[str, Any]:
    judged = [
        judge(
            comparison.outputs,
            execution,
            comparison.expected,
            comparison.usual(execution, answer),
            budget,
            comparison.yardsticks,
        )
        for execution, answer in runs.answers.items()
    ]
    outputs = tuple(verdict for each in judged for verdict in each.verdicts)
    answers = {execution: comparison.edge(answer) for execution, answer in runs.answers.items()}
    lines = judge_cases(cases, comparison.expected_cases, answers, outputs, comparison.outputs, budget)
    lines, ties = settle_ties(lines, cases, comparison, outputs, budget)
    notes = (*runs.notes, *(note for each in judged for note in each.notes), *ties)
    return {"outputs": outputs, "adversarial": lines, "headroom": headroom(lines), "notes": notes}


def _accuracies(comparison: Comparison, runs: _Runs, labels: Array) -> Accuracy:
    rounded, runtime = (comparison.usual(execution, runs.answers[execution]) for execution in ("rounded", "runtime"))
    return Accuracy(
        reference=_accuracy(comparison.expected, labels),
        rounded=_accuracy(rounded, labels),
        runtime=_accuracy(runtime, labels),
    )


def _accuracy(batches: Sequence[list[Value]], labels: Array) -> float:
    firsts = [batch[0] for batch in batches if batch and isinstance(batch[0], np.ndarray)]
    if not firsts or any(first.ndim < 2 for first in firsts):
        shape = list(firsts[0].shape) if firsts else "no tensor"
        raise ExportError(f"labels need an output with a class axis; the first output has shape {shape}")
    chosen = np.concatenate([first.argmax(1 if first.ndim > 3 else -1) for first in firsts])
    if chosen.shape != labels.shape:
        raise ExportError(f"labels have shape {list(labels.shape)}, the first output's classes {list(chosen.shape)}")
    return float((chosen == labels).mean())
