"""Verify a half-precision model: run it and its float32 reference on the same samples and judge the difference."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import onnx
import onnxruntime

from halfserve.export.certificate.budget import Budget, usual_budgets
from halfserve.export.certificate.certificate import Certificate
from halfserve.export.certificate.embed import graph_sha256
from halfserve.export.certificate.verdicts import Accuracy, PrecisionVerdict, Risk
from halfserve.export.conversion_settings import PipelineSettings
from halfserve.export.export_errors import ExportError
from halfserve.export.half_types import Accumulators, HalfName, HalfType, TargetDevice, half_named
from halfserve.export.onnx_files.model_file import ModelFile, ModelSource, open_model
from halfserve.export.onnx_files.proto_graphs import half_type_of
from halfserve.export.onnx_fp16.conversion_mark import installed_version
from halfserve.export.verification.comparison import (
    Comparison,
    ReferenceSensitivity,
    allow_reference_noise,
    reference_sensitivity,
)
from halfserve.export.verification.criteria import Criteria
from halfserve.export.verification.executions import RuntimeLevels, gpu_is_there, run_as_on_cuda, run_levels, run_simulated
from halfserve.export.verification.generated.adversarial import adversarial_cases
from halfserve.export.verification.generated.lengths import LongerSizes, VaryingSizes, longer_sizes
from halfserve.export.verification.judging import headroom
from halfserve.export.verification.remedies import exceeded
from halfserve.export.verification.samples import Array, Inputs, Value, Values, as_array, inputs_of, make_feeds, require_finite
from halfserve.export.verification.sandbox import RunResult, Sandbox
from halfserve.export.verification.ties import judge_results
from halfserve.protos.captured_requests import SampledTraffic

if TYPE_CHECKING:
    from torch import nn

    from halfserve.export.verification.judging import Judge

UNCHECKED_SHOWN = 20


class SupportsToJson(Protocol):
    """A report that can be written as JSON types."""

    def to_json(self) -> dict[str, Any]: ...


def verify(
    reference: nn.Module | ModelSource | ModelFile,
    candidate: ModelSource | ModelFile,
    inputs: Inputs,
    *,
    budget: Budget | Mapping[HalfName, Budget] | None = None,
    precisions: Collection[HalfName] = (),
    labels: Values | None = None,
    batch_size: int = 32,
    name: str = "model",
    reference_bytes: int | None = None,
    conversion: SupportsToJson | None = None,
    adversarial: bool = True,
    longest: Mapping[str, int] | None = None,
    lengths: LongerSizes | None = None,
    source: ModelSource | ModelFile | None = None,
    accumulators: Accumulators = "float32",
    target_device: TargetDevice = "any",
    placement: Mapping[str, Any] | None = None,
    cuda: bool | None = None,
    notes: Sequence[str] = (),
    traffic: SampledTraffic | None = None,
    task: Judge | None = None,
) -> Certificate:
    """Compare a float16 or bfloat16 ONNX model with its float32 reference, output by output.

    ONNX models run in child processes, so a crash, a hang or a refusal is recorded. The candidate runs with every node rounded
    to its type, which simulates half-precision hardware (see `verification.simulation`), for CUDA also with what its kernels
    round inside (see `verification.cuda_steps`), on ONNX Runtime's CPU provider at its highest sound optimisation level (a
    bfloat16 model in float32, as the server does), and on a GPU where there is one. All executions must be within the budget.
    Lower optimisation levels run on the first batch only.

    The candidate may be judged in the other half-precision type too, in which a processor may compute it: as if its half nodes
    and weights were of that type. Nodes that it keeps in float32 stay in float32.

    Args:
        reference: The float32 torch module in evaluation mode, or a float32 ONNX model.
        candidate: The half-precision ONNX model. A path may have data files beside it and be of any size.
        inputs: Samples in the reference's dtypes: an array for each input, in order or by name, whose first dimension counts
            samples; for a model without a batch dimension, arrays of its inputs' shapes; or a list of batches, each a mapping.
        budget: The limits, for every precision or by precision; those of `usual_budgets` by default.
        precisions: The types to judge the candidate in; its own by default. The certificate's own verdict is about the
            candidate's type where that is one of them, else about the first.
        labels: True classes, integers, in the first output's shape without its class axis.
        batch_size: Samples per run. A model with a fixed batch runs in that size, and a remainder is left out.
        name: The model's name in the certificate.
        reference_bytes: Size of the float32 model for the certificate; known where the reference is ONNX.
        conversion: The conversion's report (`HalfReport` or `ConversionReport`) for the certificate.
        adversarial: Whether to run adversarial samples too (see `halfserve.export.verification.generated.adversarial`).
        source: The float32 ONNX model that the candidate was converted from, where the reference is a torch module; needed to
            settle ties (see `halfserve.export.verification.ties`).
        longest: The largest sizes of dynamic dimensions, by name, that the model must accept; tested with `adversarial`.
        lengths: Sizes to test with `adversarial`, where `longest` is not given; those of `longer_sizes` by default.
        accumulators: Accumulator type of the target runtime. With "float16", sums that exceed its range are over budget,
            including sums inside matrix products and convolutions, and a note names nodes whose sums have no known bound.
        target_device: Where the model shall run; for "cpu", CUDA's kernels are not simulated.
        placement: The provider of each node (`Placement.to_json`), for the certificate.
        cuda: Whether to run on a GPU; by default where there is one.
        notes: Additional notes for the certificate, such as the origin of the samples.
        traffic: The captured requests that the samples are, for the certificate.
        task: Judges the first output in the terms of the model's task, in place of its rows' argmax.

    Raises:
        BudgetExceeded: The candidate is over budget in the certificate's own precision. Holds the certificate; its text names
            the worst violation and a remedy. Further precisions are over budget silently: see `Certificate.not_proved`.
        ExportError: A model cannot be read, opened or run on the samples, the outputs do not correspond, a sample with NaN or
            infinity has no finite answer, or headroom is requested without adversarial samples.
    """
    opened = candidate if isinstance(candidate, ModelFile) else open_model(candidate)
    settings = PipelineSettings(
        adversarial=adversarial, accumulators=accumulators, target_device=target_device, precisions=precisions
    )
    criteria = Criteria(
        budget=usual_budgets() if budget is None else budget,
        reference=open_model(reference) if isinstance(reference, onnx.ModelProto | bytes | str | Path) else reference,
        labels=labels,
        task=task,
        lengths=lengths,
        longest=longest,
        batch_size=batch_size,
        cuda=cuda,
    )
    details = CertificateDetails(
        name=name,
        source=source if source is None or isinstance(source, ModelFile) else open_model(source),
        reference_bytes=reference_bytes,
        conversion=conversion,
        placement=placement,
        notes=notes,
        traffic=traffic,
    )
    return certified(opened, inputs, settings, criteria, details)


@dataclass(frozen=True, kw_only=True)
class CertificateDetails:
    """Fields of a certificate that do not come from the comparison; see `verify`."""

    name: str
    source: ModelFile | None = None
    reference_bytes: int | None = None
    conversion: SupportsToJson | None = None
    placement: Mapping[str, Any] | None = None
    notes: Sequence[str] = ()
    traffic: SampledTraffic | None = None
    origin: Mapping[str, str] = field(default_factory=dict)


def certified(
    candidate: ModelFile, inputs: Inputs, settings: PipelineSettings, criteria: Criteria, details: CertificateDetails
) -> Certificate:
    """Compare a converted model with its reference, by default the source, in all precisions of the settings; see `verify`."""
    written = half_type_of(candidate.outline)
    half, *others = _in_order(settings.precisions, written)
    _require_measurable([half, *others], settings, criteria)
    reference = details.source if criteria.reference is None else criteria.reference
    if reference is None:
        raise ExportError("there is nothing to compare the model with; expected a reference or the source")
    wanted = inputs_of(candidate.outline)
    feeds = make_feeds(wanted, inputs, criteria.batch_size)
    lengths = _lengths(candidate, reference, inputs, settings, criteria, details)
    varying = VaryingSizes(candidate.outline)
    cases = varying.cases(feeds, lengths.sizes)
    if settings.adversarial:
        usual = adversarial_cases(wanted, feeds.batches, resizable=feeds.resizable, longest=criteria.longest)
        cases = [*usual, *cases]
    with Sandbox() as sandbox:
        comparison = Comparison(reference, candidate, sandbox, feeds, cases, details.source, criteria.task, half, written)
        require_finite(feeds.batches, comparison.expected)
        true = None if criteria.labels is None else as_array(criteria.labels)[: feeds.samples]
        own = _found(comparison, settings, criteria, true)
        further: dict[HalfName, PrecisionVerdict] = {
            other.name: _without_plots(_found(comparison.in_precision(other), settings, criteria, true).verdict)
            for other in others
        }
    onnx_reference = comparison.onnx_reference
    notes = (*details.notes, *comparison.notes, *filter(None, [lengths.note]), *own.verdict.notes)
    certificate = Certificate(
        **vars(replace(own.verdict, notes=notes)),
        model=details.name,
        precision=half.name,
        precisions=further,
        onnx_sha256=candidate.sha256,
        onnx_bytes=candidate.size_bytes,
        graph_sha256=graph_sha256(candidate),
        reference_bytes=details.reference_bytes or (None if onnx_reference is None else onnx_reference.size_bytes),
        samples=feeds.samples,
        traffic=details.traffic,
        sizes=varying.tried([*feeds.batches, *(case.feed for case in cases)]),
        probe=own.runtime.probe,
        versions=versions(),
        created_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        conversion=None if details.conversion is None else details.conversion.to_json(),
        levels=own.runtime.levels,
        placement=None if details.placement is None else dict(details.placement),
        origin=dict(details.origin),
    )
    if not certificate.passed:
        raise exceeded(certificate, comparison, own.sensitivity)
    return certificate


def _require_measurable(precisions: Sequence[HalfType], settings: PipelineSettings, criteria: Criteria) -> None:
    asked = max(criteria.budget_of(each.name).min_headroom for each in precisions)
    if asked > 1 and not settings.adversarial:
        raise ExportError(f"headroom of {asked:g} is asked for, which adversarial samples measure: leave them on or ask for 1")
    if settings.accumulators == "float16" and precisions[0].has_float32_range:
        raise ExportError("sums in float16 are asked for, and the model is bfloat16, whose sums hardware takes in float32")


def _lengths(
    candidate: ModelFile,
    reference: object,
    inputs: Inputs,
    settings: PipelineSettings,
    criteria: Criteria,
    details: CertificateDetails,
) -> LongerSizes:
    if criteria.longest or not settings.adversarial:
        return LongerSizes()
    if criteria.lengths is not None:
        return criteria.lengths
    return longer_sizes(_runs_alike(candidate, reference, details.source), inputs, criteria.batch_size)


def _runs_alike(candidate: ModelFile, *others: object) -> ModelFile:
    """Return a float32 ONNX model with the candidate's inputs, or else the candidate itself."""
    names = [value.name for value in inputs_of(candidate.outline)]
    alike = (each for each in others if isinstance(each, ModelFile) and [v.name for v in inputs_of(each.outline)] == names)
    return next(alike, candidate)


def _in_order(precisions: Collection[HalfName], written: HalfType) -> list[HalfType]:
    """Return the types to judge a model in, each once: its own first, where it is one of them."""
    named = list(dict.fromkeys(half_named(precision) for precision in precisions)) or [written]
    return sorted(named, key=lambda half: half is not written)


@dataclass(frozen=True, kw_only=True)
class _Findings:
    """The verdict in one precision, and what only the certificate's own verdict needs."""

    verdict: PrecisionVerdict
    runtime: RuntimeLevels
    sensitivity: ReferenceSensitivity


def _found(comparison: Comparison, settings: PipelineSettings, criteria: Criteria, labels: Array | None) -> _Findings:
    """Run and judge the candidate in the comparison's precision."""
    budget = criteria.budget_of(comparison.half.name)
    sums: Accumulators = "float32" if comparison.half.has_float32_range else settings.accumulators
    run = partial(
        _run, comparison, budget, products=sums == "float16", target_device=settings.target_device, cuda=criteria.cuda
    )
    runs = run()
    judged, noise = judge_results(comparison, runs.answers, budget), tuple[str, ...]()
    over = any(verdict.violations for verdict in judged.outputs) or any(
        verdict.violations for verdict in judged.adversarial if verdict.factor is None
    )
    if over and budget.max_abs_error is None and (noise := allow_reference_noise(comparison, budget)):
        runs = run()  # judges levels
        judged = judge_results(comparison, runs.answers, budget)
    sensitivity = reference_sensitivity(comparison, judged.outputs, budget)
    verdict = PrecisionVerdict(
        budget=budget,
        outputs=judged.outputs,
        accuracy=None if labels is None else _accuracies(comparison, runs, labels),
        adversarial=judged.adversarial,
        headroom=headroom(judged.adversarial),
        accumulators=sums,
        risks=runs.risks,
        notes=(*noise, *runs.notes, *judged.notes, *sensitivity.notes),
    )
    return _Findings(verdict=verdict, runtime=runs.runtime, sensitivity=sensitivity)


def _without_plots(verdict: PrecisionVerdict) -> PrecisionVerdict:
    """Return the verdict without what only the certificate's own is shown with."""
    return replace(verdict, outputs=tuple(replace(output, plot=None) for output in verdict.outputs))


@dataclass(frozen=True, kw_only=True)
class _Runs:
    answers: dict[str, RunResult]
    runtime: RuntimeLevels
    risks: tuple[Risk, ...]
    notes: tuple[str, ...]


def _run(comparison: Comparison, budget: Budget, *, products: bool, target_device: TargetDevice, cuda: bool | None) -> _Runs:
    half, written = comparison.half, comparison.written
    runtime = run_levels(comparison, budget, below=half is written)  # first: it reports best why a model does not open
    simulated = run_simulated(
        comparison.candidate,
        comparison.sandbox,
        comparison.staged,
        user_batches=len(comparison.batches),
        products=products,
        half=half,
        written=written,
    )
    answers, notes = {"rounded": simulated.answer}, []
    if half is written and target_device != "cpu":  # in the other type, CPUs with its arithmetic compute the file
        on_cuda = run_as_on_cuda(comparison.candidate, comparison.sandbox, comparison.staged, half)
        answers |= {} if on_cuda is None else {"cuda": on_cuda}
    answers["runtime"] = runtime.answer
    if products and simulated.unchecked:
        shown, others = simulated.unchecked[:UNCHECKED_SHOWN], len(simulated.unchecked) - UNCHECKED_SHOWN
        more = f" and {others} more" if others > 0 else ""
        notes.append(f"no bound is known for the sums inside {', '.join(shown)}{more}")
    if half is written and (gpu_is_there() if cuda is None else cuda):  # a GPU computes the file as it is written
        on_gpu = comparison.on_cuda()
        if on_gpu is not None:
            answers["gpu"] = on_gpu
        elif half.has_float32_range:
            notes.append(
                "ONNX Runtime's CUDA provider does not run this bfloat16 model: the simulation shows what a GPU computes"
            )
        elif cuda:
            raise ExportError("ONNX Runtime cannot use a GPU here; install its CUDA libraries, or leave the GPU out")
        else:
            notes.append("there is a GPU, but ONNX Runtime cannot use it: its CUDA libraries are missing")
    return _Runs(answers=answers, runtime=runtime, risks=simulated.risks, notes=tuple(notes))


def _accuracies(comparison: Comparison, runs: _Runs, labels: Array) -> Accuracy:
    rounded, runtime = (comparison.user_answers(execution, runs.answers[execution]) for execution in ("rounded", "runtime"))
    return Accuracy(
        reference=_accuracy(comparison.expected, labels),
        rounded=_accuracy(rounded, labels),
        runtime=_accuracy(runtime, labels),
    )


def _accuracy(batches: Sequence[list[Value]], labels: Array) -> float:
    firsts = [batch[0] for batch in batches if batch and isinstance(batch[0], np.ndarray)]
    if not firsts or any(first.ndim < 2 for first in firsts):
        shape = list(firsts[0].shape) if firsts else "no tensor"
        raise ExportError(f"labels need a first output with a class axis; its shape is {shape}")
    chosen = np.concatenate([first.argmax(1 if first.ndim > 3 else -1) for first in firsts])
    if chosen.shape != labels.shape:
        raise ExportError(f"labels have shape {list(labels.shape)}, the first output's classes {list(chosen.shape)}")
    return float((chosen == labels).mean())


def versions() -> dict[str, str]:
    """Versions of halfserve, torch where it is loaded, onnx, onnxruntime and numpy."""
    torch = {"torch": str(sys.modules["torch"].__version__)} if "torch" in sys.modules else {}
    libraries = {"onnx": str(onnx.__version__), "onnxruntime": str(onnxruntime.__version__), "numpy": str(np.__version__)}
    return {"halfserve": installed_version(), **torch, **libraries}
