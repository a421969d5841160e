"""Verify a half-precision model: run it and its float32 reference on the same samples and judge the difference."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import numpy as np
import onnx
import onnxruntime

from halfserve.export.certificate.budget import (
    NO_HEADROOM,
    NOTHING_FINITE,
    Budget,
    allowed_near_ties,
    disagrees,
    error_limit,
    usual_budget,
)
from halfserve.export.certificate.certificate import Accuracy, BudgetExceeded, Certificate, OutputVerdict, Risk
from halfserve.export.certificate.embed import graph_sha256
from halfserve.export.errors import ExportError
from halfserve.export.half_types import HALF_BY_ELEM_TYPE, HalfType
from halfserve.export.onnx_files.model_file import ModelFile, ModelSource, open_model
from halfserve.export.onnx_files.proto_graphs import half_type_of
from halfserve.export.verification.comparison import (
    Comparison,
    ReferenceSensitivity,
    allow_reference_noise,
    reference_sensitivity,
)
from halfserve.export.verification.executions import RuntimeLevels, gpu_is_there, run_levels, run_simulated
from halfserve.export.verification.generated_samples import adversarial_cases
from halfserve.export.verification.judging import headroom
from halfserve.export.verification.samples import Array, Inputs, Value, Values, as_array, inputs_of, make_feeds, require_finite
from halfserve.export.verification.sandbox import RunResult, Sandbox
from halfserve.export.verification.simulation import MOVERS
from halfserve.export.verification.ties import judge_results

if TYPE_CHECKING:
    from torch import nn

    from halfserve.export.verification.judging import Judge

Accumulators: TypeAlias = Literal["float32", "float16"]
UNCHECKED_SHOWN = 20
# Each remedy by its two names: Python's argument, and the command's option.
MEANS = (
    "node_block_list, op_block_list of convert, or --block-node, --block-op of halfserve convert; keep_fp32 of export_module, "
    "or --keep-fp32 of halfserve export"
)
KEEP_TYPES = "keep_io_types=True or --keep-io-types"
NODES_NAMED = 6


class SupportsToJson(Protocol):
    """A report that can be written as JSON types."""

    def to_json(self) -> dict[str, Any]: ...


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
    conversion: SupportsToJson | None = None,
    adversarial: bool = True,
    longest: Mapping[str, int] | None = None,
    source: ModelSource | ModelFile | None = None,
    accumulators: Accumulators = "float32",
    placement: Mapping[str, Any] | None = None,
    cuda: bool | None = None,
    notes: Sequence[str] = (),
    task: Judge | None = None,
) -> Certificate:
    """Compare a float16 or bfloat16 ONNX model with its float32 reference, output by output.

    ONNX models run in child processes, so a crash, a hang or a refusal is recorded. The candidate runs with every node rounded
    to its type, which simulates half-precision hardware (see `verification.simulation`), on ONNX Runtime's CPU provider at its
    highest sound optimisation level (a bfloat16 model in float32, as the server does), and on a GPU where there is one. All
    executions must be within the budget. Lower optimisation levels run on the first batch only.

    Args:
        reference: The float32 torch module in evaluation mode, or a float32 ONNX model.
        candidate: The half-precision ONNX model. A path may have data files beside it and be of any size.
        inputs: Samples in the reference's dtypes: an array for each input, in order or by name, whose first dimension counts
            samples; for a model without a batch dimension, arrays of its inputs' shapes; or a list of batches, each a mapping.
        budget: The limits; those of `usual_budget` for the candidate's type by default.
        labels: True classes, integers, in the first output's shape without its class axis.
        batch_size: Samples per run. A model with a fixed batch runs in that size, and a remainder is left out.
        name: The model's name in the certificate.
        reference_bytes: Size of the float32 model for the certificate; known where the reference is ONNX.
        conversion: The conversion's report (`HalfReport` or `ConversionReport`) for the certificate.
        adversarial: Whether to run adversarial samples too (see `halfserve.export.verification.generated_samples`).
        source: The float32 ONNX model that the candidate was converted from, where the reference is a torch module; needed to
            settle ties (see `halfserve.export.verification.ties`).
        longest: Sizes of dynamic dimensions, by name, that the model must accept; tested with `adversarial`.
        accumulators: Accumulator type of the target runtime. With "float16", sums that exceed its range are over budget,
            including sums inside matrix products and convolutions, and a note names nodes whose sums have no known bound.
        placement: Which provider runs which node (`Placement.to_json`), for the certificate.
        cuda: Whether to run on a GPU; by default where there is one.
        notes: Additional notes for the certificate, such as the origin of the samples.
        task: Judges the first output in the terms of the model's task, in place of its rows' argmax.

    Raises:
        BudgetExceeded: The candidate is over budget. Holds the certificate; its text names the worst violation and a remedy.
        ExportError: A model cannot be read, opened or run on the samples, the outputs do not correspond, a sample with NaN or
            infinity has no finite answer, or headroom is requested without adversarial samples.
    """
    opened = candidate if isinstance(candidate, ModelFile) else open_model(candidate)
    half = half_type_of(opened.outline)
    budget = budget or usual_budget(half.name)
    if budget.min_headroom > 1 and not adversarial:
        raise ExportError(
            f"headroom of {budget.min_headroom:g} is asked for, which adversarial samples measure: leave them on or ask for 1"
        )
    if accumulators == "float16" and half.has_float32_range:
        raise ExportError("sums in float16 are asked for, and the model is bfloat16, whose sums hardware takes in float32")
    wanted = inputs_of(opened.outline)
    feeds = make_feeds(wanted, inputs, batch_size)
    cases = adversarial_cases(wanted, feeds.batches, resizable=feeds.resizable, longest=longest) if adversarial else []
    with Sandbox() as sandbox:
        made_from = source if source is None or isinstance(source, ModelFile) else open_model(source)
        comparison = Comparison(reference, opened, sandbox, feeds, cases, made_from, task, half)
        require_finite(feeds.batches, comparison.expected)
        runs = _run(comparison, budget, products=accumulators == "float16", cuda=cuda)
        judged = judge_results(comparison, runs.answers, budget)
        over = any(verdict.violations for verdict in judged.outputs) or any(
            verdict.violations for verdict in judged.adversarial if verdict.factor is None
        )
        if over and budget.max_abs_error is None and (noise := allow_reference_noise(comparison, budget)):
            runs = _run(comparison, budget, products=accumulators == "float16", cuda=cuda)  # judges levels
            judged = judge_results(comparison, runs.answers, budget)
            judged = replace(judged, notes=(*noise, *runs.notes, *judged.notes))
        else:
            judged = replace(judged, notes=(*runs.notes, *judged.notes))
        sensitivity = reference_sensitivity(comparison, judged.outputs, budget)
    onnx_reference = comparison.onnx_reference
    certificate = Certificate(
        model=name,
        precision=half.name,
        onnx_sha256=opened.sha256,
        onnx_bytes=opened.size_bytes,
        graph_sha256=graph_sha256(opened),
        reference_bytes=reference_bytes or (None if onnx_reference is None else onnx_reference.size_bytes),
        samples=feeds.samples,
        budget=budget,
        outputs=judged.outputs,
        accuracy=None if labels is None else _accuracies(comparison, runs, as_array(labels)[: feeds.samples]),
        probe=runs.runtime.probe,
        versions=versions(),
        created_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        conversion=None if conversion is None else conversion.to_json(),
        levels=runs.runtime.levels,
        adversarial=judged.adversarial,
        headroom=headroom(judged.adversarial),
        accumulators=accumulators,
        risks=runs.risks,
        placement=None if placement is None else dict(placement),
        notes=(*notes, *comparison.notes, *judged.notes, *sensitivity.notes),
    )
    if not certificate.passed:
        unprovable = all(NOTHING_FINITE in text or NO_HEADROOM in text for text in certificate.violations)
        raise BudgetExceeded(
            _worst_violation(certificate),
            certificate,
            cause="" if unprovable else _cause(certificate, sensitivity, opened.outline.graph, onnx_reference),
            remedy="" if unprovable else _choices_alone(certificate) or _general_remedy(certificate),
        )
    return certificate


@dataclass(frozen=True, kw_only=True)
class _Runs:
    answers: dict[str, RunResult]
    runtime: RuntimeLevels
    risks: tuple[Risk, ...]
    notes: tuple[str, ...]


def _run(comparison: Comparison, budget: Budget, *, products: bool, cuda: bool | None) -> _Runs:
    half = comparison.half
    runtime = run_levels(comparison, budget)  # first: it reports best why a model does not open
    simulated = run_simulated(
        comparison.candidate,
        comparison.sandbox,
        comparison.staged,
        user_batches=len(comparison.batches),
        products=products,
        half=half,
    )
    answers, notes = {"rounded": simulated.answer, "runtime": runtime.answer}, []
    if products and simulated.unchecked:
        shown, others = simulated.unchecked[:UNCHECKED_SHOWN], len(simulated.unchecked) - UNCHECKED_SHOWN
        more = f" and {others} more" if others > 0 else ""
        notes.append(f"no bound is known for the sums inside {', '.join(shown)}{more}")
    if gpu_is_there() if cuda is None else cuda:
        on_gpu = comparison.on_cuda()
        if on_gpu is not None:
            answers["cuda"] = on_gpu
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


def _worst_violation(certificate: Certificate) -> str:
    """The first violation, and how many more there are."""
    violations = certificate.violations
    if not violations:
        return "no output holds a number that was compared, so nothing is proved; give samples that the model answers with some"
    return violations[0] + (f" (and {len(violations) - 1} more over budget)" if len(violations) > 1 else "")


def _cause(
    certificate: Certificate, sensitivity: ReferenceSensitivity, candidate: onnx.GraphProto, reference: ModelFile | None
) -> str:
    """A cause other than sensitive layers, with its remedy; empty where none is known."""
    if sensitivity.nondeterministic:
        return (
            f"float32 itself answers the same samples differently a second time ({sensitivity.nondeterministic[0]}): "
            "it draws random numbers or keeps state between calls, so nothing can be proved; make it deterministic"
        )
    if too_large := _too_large_remedy(candidate, certificate, sensitivity.half):
        return too_large
    if vanishing := _vanishing_remedy(candidate, reference, certificate.outputs):
        return vanishing
    if sensitivity.violations:
        half = sensitivity.half.name
        found = f"float32 itself leaves the budget when only its inputs are rounded to {half} ({sensitivity.violations[0]})"
        way_out = f"so it tolerates little {half}: allow more, or serve it in float32"
        if sensitivity.half_inputs:
            way_out = f"so {half} inputs cannot meet it: keep float32 ones ({KEEP_TYPES}) or allow more"
        return f"{found}, {way_out}"
    return ""


def _too_large_remedy(candidate: onnx.GraphProto, certificate: Certificate, half: HalfType) -> str:
    """The remedy for outputs whose numbers their half-precision type does not hold; empty where there is none."""
    narrow = {value.name for value in candidate.output if value.type.tensor_type.elem_type == half.elem_type}
    for verdict in certificate.outputs:
        if verdict.violations and verdict.name in narrow and verdict.figures.scale > half.largest:
            return (
                f"the output {verdict.name!r} reaches {verdict.figures.scale:.4g} in float32, and {half.name} ends at "
                f"{half.largest:g}: let it stay float32 (keep_io_types=[{verdict.name!r}] or --keep-io-types), or scale it in "
                "the model"
            )
    return ""


def _general_remedy(certificate: Certificate) -> str:
    non_finite = any(verdict.figures.non_finite > certificate.budget.max_non_finite for verdict in certificate.outputs)
    at_user_samples = any(verdict.violations for verdict in certificate.outputs) or not any(
        verdict.violations for verdict in certificate.adversarial if verdict.factor is None
    )
    parts = "the layers that overflow" if non_finite else "sensitive layers"
    edge = "" if at_user_samples else "; where no such input can come, leave those samples out (--no-adversarial)"
    return f"keep {parts} in float32 ({MEANS}) or allow a larger difference{edge}"


def _choices_alone(certificate: Certificate) -> str | None:
    """The remedy where only the agreement is over budget; None otherwise."""
    budget, over = certificate.budget, [verdict.figures for verdict in certificate.outputs if verdict.violations]
    lost = [figures for figures in over if disagrees(figures, budget) and not allowed_near_ties(figures, budget)]
    if not lost or len(lost) != len(certificate.violations):
        return None
    layers = f"keep sensitive layers in float32 ({MEANS})"
    if any(figures.margin > error_limit(figures, budget) for figures in lost):
        return f"{layers} or allow more rows to differ (--min-agreement)"
    share = math.floor(min(figures.agreement or 0.0 for figures in lost) * 1000) / 1000
    return (
        "where they differ, float32's two numbers are closer than the error that is allowed, "
        f"so verify on other or more samples, {layers} or allow it (--min-agreement {share:g})"
    )


def _vanishing_remedy(candidate: onnx.GraphProto, reference: ModelFile | None, verdicts: Sequence[OutputVerdict]) -> str:
    """The remedy for outputs that vanish on the user's samples, with the options to use; empty where none does."""
    vanished = {verdict.name for verdict in verdicts if verdict.figures.vanished is not None and verdict.violations}
    if not vanished:
        return ""
    half = any(v.name in vanished and v.type.tensor_type.elem_type in HALF_BY_ELEM_TYPE for v in candidate.output)
    types = " --keep-io-types" if half else ""
    if reference is None:
        options = f"{KEEP_TYPES}; " if half else ""
        options += "keep_fp32 of export_module, --keep-fp32 of halfserve export"
        return f"keep in float32 what vanishes ({options}), or rescale it in the model"
    known = {node.name for node in reference.outline.graph.node}
    names = [name for name in dict.fromkeys(_computing(candidate, vanished)) if name in known or "" in known]
    blocked = "".join(f" --block-node {shlex.quote(name)}" for name in names) if len(names) <= NODES_NAMED else ""
    file = "MODEL.onnx" if reference.path is None else shlex.quote(str(reference.path))
    return (
        f"keep in float32 what vanishes: halfserve convert {file} TARGET.onnx{types}{blocked}, "
        "where --search, on by default, finds what else that needs; or rescale it in the model"
    )


def _computing(graph: onnx.GraphProto, outputs: set[str]) -> Iterator[str]:
    """Names of the last nodes that compute the outputs, and of moving nodes after them, without casts."""
    makers = {name: node for node in graph.node for name in node.output}
    waiting, seen = list(outputs), set(outputs)
    while waiting:
        node = makers.get(waiting.pop())
        if node is None:
            continue
        if node.op_type != "Cast":
            yield node.name
        if node.op_type in MOVERS:
            new = [name for name in node.input if name and name not in seen]
            seen.update(new)
            waiting += new


def versions() -> dict[str, str]:
    """Versions of halfserve, torch where it is loaded, onnx, onnxruntime and numpy."""
    torch = {"torch": str(sys.modules["torch"].__version__)} if "torch" in sys.modules else {}
    libraries = {"onnx": str(onnx.__version__), "onnxruntime": str(onnxruntime.__version__), "numpy": str(np.__version__)}
    return {"halfserve": _own_version(), **torch, **libraries}


def _own_version() -> str:
    try:
        return version("halfserve")
    except PackageNotFoundError:  # a source tree that is not installed
        return "unknown"
