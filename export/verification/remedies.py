"""Advice on a candidate over budget: the cause if it is known, and a remedy with the names of its options.

Where a candidate answers NaN or infinity, the cause is looked for in its weights, and then in the results of its nodes.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import onnx
import onnx_ir
from onnx import helper

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
from halfserve.export.export_errors import ExportError
from halfserve.export.half_types import HALF_BY_ELEM_TYPE, HalfType
from halfserve.export.onnx_files.model_file import PROTOBUF_LIMIT_BYTES, ModelFile, serialize
from halfserve.export.onnx_fp16.element_types import infer_types
from halfserve.export.verification.comparison import Comparison, ReferenceSensitivity
from halfserve.export.verification.samples import as_array, inputs_of
from halfserve.export.verification.sandbox import Sandbox, open_reference, written_model
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
    cause = _cause(certificate, sensitivity, comparison)
    remedy = _choices_alone(certificate) or _general_remedy(certificate)
    advised = replace(certificate, advice=cause or remedy)
    return BudgetExceeded(certificate.worst_violation, advised, cause=cause, remedy=remedy)


def _cause(certificate: Certificate, sensitivity: ReferenceSensitivity, comparison: Comparison) -> str:
    """Return a cause other than sensitive layers, with its remedy; empty where none is known."""
    if sensitivity.nondeterministic:
        return (
            f"float32 itself answers the same samples differently a second time ({sensitivity.nondeterministic[0]}): "
            "it draws random numbers or keeps state between calls, so nothing can be proved; make it deterministic"
        )
    candidate = comparison.candidate.outline.graph
    broken = [verdict.figures for verdict in certificate.outputs if verdict.violations]
    broken += [verdict.figures for verdict in certificate.adversarial if verdict.violations and verdict.figures is not None]
    if any(figures.non_finite for figures in broken):
        with suppress(ExportError):  # a model that cannot be searched has the other remedies
            if overflow := _lost_weights(comparison) or _overflowing_node(comparison):
                return overflow
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
                f"{half.largest:g}: let it stay float32 (convert without --float16-io, in Python with "
                f"keep_io_types=[{verdict.name!r}]), or scale it in the model"
            )
    return ""


def _lost_weights(comparison: Comparison) -> str:
    """Name the weights that hold NaN or infinity where float32's are finite; empty where there are none."""
    if comparison.source is None:
        return ""
    wide = comparison.source.to_ir().graph.initializers
    graph, half = comparison.candidate.to_ir().graph, comparison.written
    lost: list[tuple[onnx_ir.Value, int, int, float]] = []
    for value in graph.initializers.values():
        narrow, original = value.const_value, wide.get(value.name or "")
        if narrow is None or int(narrow.dtype) != half.elem_type or original is None or original.const_value is None:
            continue
        broken = ~np.isfinite(narrow.numpy().astype(np.float32))
        if broken.any() and np.isfinite(numbers := original.const_value.numpy()).all():
            lost.append((value, int(broken.sum()), broken.size, float(np.abs(numbers).max())))
    if not lost:
        return ""
    value, count, elements, largest = lost[0]
    reader = next((f" of {_called(node)}" for node in value.consumers()), "")
    more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
    return (
        f"the weight {value.name!r}{reader}{more} overflowed: {count:,} of its {elements:,} numbers became NaN or infinite, as "
        f"they reach {largest:.3g} in float32 and {half.name} ends at {half.largest:g}; {_converted_again(comparison)}"
    )


def _overflowing_node(comparison: Comparison) -> str:
    """Name the first node whose half-precision result leaves the type's range in float32; empty where there is none.

    A model's own outputs are left to `_too_large_remedy`.
    """
    source, half = comparison.source, comparison.written
    if source is None or source.size_bytes > PROTOBUF_LIMIT_BYTES:
        return ""
    typed = comparison.candidate.to_ir().clone()
    infer_types(typed)
    own = {value.name for value in typed.graph.outputs}
    nodes = {
        value.name: node
        for node in typed.graph
        for value in node.outputs
        if value.name not in own and value.dtype is not None and int(value.dtype) == half.elem_type
    }
    model = onnx.ModelProto()
    model.CopyFrom(source.proto)
    made = {name for node in model.graph.node for name in node.output}
    names = [name for name in nodes if name in made]
    for number, name in enumerate(names):
        magnitude, largest = f"halfserve/magnitude/{number}", f"halfserve/largest/{number}"
        model.graph.node.append(helper.make_node("Abs", [name], [magnitude]))
        model.graph.node.append(helper.make_node("ReduceMax", [magnitude], [largest], keepdims=0))
        model.graph.output.append(helper.make_tensor_value_info(largest, onnx.TensorProto.FLOAT, []))
    if not names or {value.name for value in inputs_of(model)} != set(comparison.batches[0]):
        return ""
    with Sandbox() as sandbox:  # the comparison's own is closed
        answers = open_reference(written_model(serialize(model), sandbox), sandbox, sandbox.stage(comparison.batches))
    reaches = [[float(as_array(value)) for value in batch[-len(names) :]] for batch in answers if not isinstance(batch, str)]
    for name, reach in zip(names, map(max, zip(*reaches, strict=True)), strict=False):
        if half.largest < reach < math.inf:
            return (
                f"the result {name!r} of {_called(nodes[name])} reaches {reach:.3g} in float32, and "
                f"{half.name} ends at {half.largest:g}: keep this node in float32 (keep_fp32_nodes or --keep-fp32-nodes), or "
                f"{_converted_again(comparison)}"
            )
    return ""


def _called(node: onnx_ir.Node) -> str:
    return f"{node.op_type} {node.name!r}" if node.name else f"a {node.op_type}"


def _converted_again(comparison: Comparison) -> str:
    path = None if comparison.source is None else comparison.source.path
    file = "MODEL.onnx" if path is None or comparison.onnx_reference is None else shlex.quote(str(path))
    return f"convert with halfserve convert {file} TARGET.onnx, which keeps in float32 what needs it"


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
