"""Advice on a candidate over budget: the cause if it is known, and a remedy with the names of its options."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence

import onnx

from halfserve.export.certificate.budget import (
    FEW_ROWS_LEFT,
    NO_HEADROOM,
    NOTHING_FINITE,
    allowed_near_ties,
    disagrees,
    error_limit,
)
from halfserve.export.certificate.certificate import BudgetExceeded, Certificate
from halfserve.export.certificate.verdicts import OutputVerdict
from halfserve.export.half_types import HALF_BY_ELEM_TYPE, HalfType
from halfserve.export.onnx_files.model_file import ModelFile
from halfserve.export.verification.comparison import Comparison, ReferenceSensitivity
from halfserve.export.verification.simulation import MOVERS

# Each remedy by its two names: Python's argument, and the command's option.
OF_MODULES = "keep_fp32 or --keep-fp32"
MEANS = f"keep_fp32_nodes or --keep-fp32-nodes, keep_fp32_ops or --keep-fp32-ops, in a torch module also {OF_MODULES}"
KEEP_TYPES = "keep_io_types=True or --keep-io-types"
NODES_NAMED = 6
_SAMPLES_AT_FAULT = (NOTHING_FINITE, NO_HEADROOM, FEW_ROWS_LEFT)


def exceeded(certificate: Certificate, comparison: Comparison, sensitivity: ReferenceSensitivity) -> BudgetExceeded:
    """Return the error of a candidate that is over budget: its worst violation, and the cause or a remedy."""
    if all(any(part in text for part in _SAMPLES_AT_FAULT) for text in certificate.violations):
        return BudgetExceeded(certificate.worst_violation, certificate)
    return BudgetExceeded(
        certificate.worst_violation,
        certificate,
        cause=_cause(certificate, sensitivity, comparison),
        remedy=_choices_alone(certificate) or _general_remedy(certificate),
    )


def _cause(certificate: Certificate, sensitivity: ReferenceSensitivity, comparison: Comparison) -> str:
    """Return a cause other than sensitive layers, with its remedy; empty where none is known."""
    if sensitivity.nondeterministic:
        return (
            f"float32 itself answers the same samples differently a second time ({sensitivity.nondeterministic[0]}): "
            "it draws random numbers or keeps state between calls, so nothing can be proved; make it deterministic"
        )
    candidate = comparison.candidate.outline.graph
    if too_large := _too_large_remedy(candidate, certificate, comparison.written):
        return too_large
    if vanishing := _vanishing_remedy(candidate, comparison.onnx_reference, certificate.outputs):
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
    """Return the remedy for outputs whose numbers their half-precision type does not hold; empty where there is none."""
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
    """Return the remedy where only the agreement is over budget; None otherwise."""
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
    """Return the remedy for outputs that vanish on the user's samples, with the options to use; empty where none does."""
    vanished = {verdict.name for verdict in verdicts if verdict.figures.vanished is not None and verdict.violations}
    if not vanished:
        return ""
    half = any(v.name in vanished and v.type.tensor_type.elem_type in HALF_BY_ELEM_TYPE for v in candidate.output)
    types = " --keep-io-types" if half else ""
    if reference is None:
        options = f"{KEEP_TYPES}; " if half else ""
        options += OF_MODULES
        return f"keep in float32 what vanishes ({options}), or rescale it in the model"
    known = {node.name for node in reference.outline.graph.node}
    names = [name for name in dict.fromkeys(_computing(candidate, vanished)) if name in known or "" in known]
    nodes = "".join(f" --keep-fp32-nodes {shlex.quote(name)}" for name in names) if len(names) <= NODES_NAMED else ""
    file = "MODEL.onnx" if reference.path is None else shlex.quote(str(reference.path))
    return (
        f"keep in float32 what vanishes: halfserve convert {file} TARGET.onnx{types}{nodes}, "
        "where --search, on by default, finds what else that needs; or rescale it in the model"
    )


def _computing(graph: onnx.GraphProto, outputs: set[str]) -> Iterator[str]:
    """Yield names of the last nodes that compute the outputs, and of moving nodes after them, without casts."""
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
