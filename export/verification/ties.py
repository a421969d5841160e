"""Choices between ties: a float16 model may take another of two values that float32 itself hardly tells apart.

TopK, ArgMax and ArgMin turn a difference far below rounding into another index, and what is looked up by an index may be
anything: another expert's answer, another box. Samples at the edge are full of ties: zeros give many rows the same scores.
Where such a sample is over budget, the candidate's choices are read, and float32 runs again with these choices instead of its
own. The sample is within budget if float32's scores for both choices are as close as an error may be, and the outputs agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
from onnx import TensorProto, helper

from export.certificate.budget import Budget
from export.certificate.certificate import OutputVerdict
from export.certificate.verdicts import AdversarialVerdict
from export.errors import ExportError
from export.files.model_file import open_model
from export.verification.adversarial import Case
from export.verification.children import CUDA, Value
from export.verification.comparison import Comparison
from export.verification.edge_cases import judge_cases
from export.verification.executions import INLINE_LIMIT_BYTES, LEVELS, on_disk, open_reference, run_simulated
from export.verification.metrics import Array
from export.weight_ledger import FP16_SMALLEST_NORMAL

PREFIX = "halfserve/ties/"
INDICES = {"TopK": 1, "ArgMax": 0, "ArgMin": 0}  # which output of each operator holds them


@dataclass(frozen=True, kw_only=True)
class _Choice:
    """A node of the float32 model that chooses among scores, and that the candidate has too."""

    node: onnx.NodeProto
    indices: str

    def attribute(self, name: str, default: int) -> int:
        return next((entry.i for entry in self.node.attribute if entry.name == name), default)

    @property
    def title(self) -> str:
        return f"{self.node.op_type} {self.node.name or self.indices!r}"

    @property
    def axis(self) -> int:
        return self.attribute("axis", -1 if self.node.op_type == "TopK" else 0)

    @property
    def largest(self) -> bool:
        return self.node.op_type == "ArgMax" or (self.node.op_type == "TopK" and bool(self.attribute("largest", 1)))

    def rows(self, scores: Array, indices: Array) -> tuple[Array, Array]:
        """Scores and chosen indices with the choices along the last axis; the smaller is better after the sign is changed."""
        if self.node.op_type != "TopK" and not self.attribute("keepdims", 1):
            indices = np.expand_dims(indices, self.axis)
        moved = np.moveaxis(scores, self.axis, -1).astype(np.float64)
        return (-moved if self.largest else moved), np.moveaxis(indices, self.axis, -1)


@dataclass(frozen=True, kw_only=True)
class _Difference:
    """The choice that is furthest from float32's own: in words, and whether the two values tie."""

    text: str
    tied: bool


def settle_ties(
    lines: Sequence[AdversarialVerdict],
    cases: Sequence[Case],
    comparison: Comparison,
    usual: Sequence[OutputVerdict],
    budget: Budget,
) -> tuple[tuple[AdversarialVerdict, ...], tuple[str, ...]]:
    """Judge lines that are over budget again with the candidate's choices between ties.

    A line that remains over budget says where the candidate has chosen otherwise. Models over 256 MiB, and choices inside the
    bodies of If, Loop and Scan, are left as they are.

    Args:
        lines: What `judge_cases` said of the cases.
        cases: The adversarial batches.
        comparison: The models and their batches.
        usual: The verdicts on the user's samples.
        budget: The limits.

    Returns:
        The lines, and a note for each that is within budget only because the values tie.
    """
    over = {(line.execution, line.case) for line in lines if line.violations and line.output}
    choices = _choices(comparison) if over else []
    settled, notes = list(lines), []
    for number, case in enumerate(cases) if choices else ():
        for execution in [name for name, broken in sorted(over) if broken == case.name]:
            try:
                again, difference = _again(choices, (number, case), execution, comparison, usual, budget)
            except ExportError:  # what cannot be run so says nothing of ties
                continue
            for place, line in enumerate(lines):
                if (line.execution, line.case) == (execution, case.name) and line.violations and difference is not None:
                    settled[place] = _settled(line, again, difference)
                    if not settled[place].violations:
                        notes.append(f"output {line.output!r} on {case.name} ({execution}): {difference.text}")
    return tuple(settled), tuple(notes)


def _settled(line: AdversarialVerdict, again: Sequence[AdversarialVerdict], difference: _Difference) -> AdversarialVerdict:
    replayed = next((other for other in again if other.output == line.output), line)
    if difference.tied and not replayed.violations:
        return replace(line, figures=replayed.figures, violations=())
    first, *others = line.violations
    rest = f", and differs by more than that choice: {replayed.violations[0]}" if difference.tied else ""
    return replace(line, violations=(f"{first}; {difference.text}{rest}", *others))


def _choices(comparison: Comparison) -> list[_Choice]:
    source, candidate = comparison.source, comparison.candidate
    if source is None or max(source.size_bytes, candidate.size_bytes) > INLINE_LIMIT_BYTES:
        return []
    theirs = {name for node in candidate.outline.graph.node if node.op_type in INDICES for name in node.output}
    nodes = [node for node in source.outline.graph.node if node.op_type in INDICES and not node.domain]
    found = [(node, node.output[INDICES[node.op_type]]) for node in nodes if len(node.output) > INDICES[node.op_type]]
    return [_Choice(node=node, indices=name) for node, name in found if name and name in theirs]


def _again(
    choices: Sequence[_Choice],
    numbered: tuple[int, Case],
    execution: str,
    comparison: Comparison,
    usual: Sequence[OutputVerdict],
    budget: Budget,
) -> tuple[tuple[AdversarialVerdict, ...], _Difference | None]:
    """The verdicts on one case with float32 bound to the candidate's choices, and where these differ from its own."""
    number, case = numbered
    count = len(comparison.outputs)
    got = _run_candidate(choices, number, execution, comparison)
    indices = [value for value in got[count:] if isinstance(value, np.ndarray)]
    if len(indices) != len(choices):
        raise ExportError("a choice has no result")
    bound = _run_bound(choices, indices, case, comparison)
    scores = [value for value in bound[count:] if isinstance(value, np.ndarray)]
    lines = judge_cases([case], [bound[:count]], {execution: [got[:count]]}, usual, comparison.outputs, budget)
    limit = budget.max_scaled_error * budget.adversarial_factor
    differences = [_difference(*each, limit) for each in zip(choices, scores, indices, strict=True)]
    told = [difference for difference in differences if difference is not None]
    return lines, min(told, key=lambda difference: difference.tied, default=None)


def _run_candidate(choices: Sequence[_Choice], number: int, execution: str, comparison: Comparison) -> list[Value]:
    """The candidate's outputs on a case, then the indices that it chose."""
    model = onnx.ModelProto()
    model.CopyFrom(comparison.candidate.proto)
    for place, choice in enumerate(choices):
        model.graph.node.append(helper.make_node("Identity", [choice.indices], [f"{PREFIX}indices{place}"]))
        model.graph.output.append(helper.make_tensor_value_info(f"{PREFIX}indices{place}", TensorProto.INT64, None))
    exposed, children = open_model(model), comparison.children
    staged = [comparison.staged_cases[number]]
    if execution == "rounded":
        batches = run_simulated(exposed, children, staged, usual=0, products=False).answer.batches
    elif execution == "cuda":
        batches = children.run(on_disk(exposed, children), staged, level=LEVELS[0], provider=CUDA).batches
    else:
        batches = open_reference(on_disk(exposed, children), children, staged)
    return _first(batches)


def _run_bound(choices: Sequence[_Choice], indices: Sequence[Array], case: Case, comparison: Comparison) -> list[Value]:
    """Float32's outputs on a case where the given indices are chosen, then the scores that it would have chosen from."""
    if comparison.source is None:
        raise ExportError("there is no float32 ONNX model")
    model = onnx.ModelProto()
    model.CopyFrom(comparison.source.proto)
    nodes: list[onnx.NodeProto] = []
    bound = {choice.indices: place for place, choice in enumerate(choices)}
    for node in model.graph.node:
        place = next((bound[name] for name in node.output if name in bound), None)
        nodes += [node] if place is None else _bound_nodes(choices[place], f"{PREFIX}given{place}", f"{PREFIX}scores{place}")
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    for place in range(len(choices)):
        model.graph.input.append(helper.make_tensor_value_info(f"{PREFIX}given{place}", TensorProto.INT64, None))
        model.graph.output.append(helper.make_tensor_value_info(f"{PREFIX}scores{place}", TensorProto.FLOAT, None))
    feed = {**case.feed, **{f"{PREFIX}given{place}": array for place, array in enumerate(indices)}}
    children = comparison.children
    return _first(open_reference(on_disk(open_model(model), children), children, children.stage([feed])))


def _bound_nodes(choice: _Choice, given: str, scores: str) -> list[onnx.NodeProto]:
    """What stands in a choosing node's place; its input is given out as `scores`."""
    source = choice.node.input[0]
    nodes = [
        helper.make_node("Cast", [source], [scores], to=TensorProto.FLOAT),
        helper.make_node("Identity", [given], [choice.indices]),
    ]
    if choice.node.op_type == "TopK" and choice.node.output[0]:
        nodes.append(helper.make_node("GatherElements", [source, given], [choice.node.output[0]], axis=choice.axis))
    return nodes


def _first(batches: Sequence[list[Value] | str]) -> list[Value]:
    if not batches or isinstance(batches[0], str):
        raise ExportError(batches[0] if batches and isinstance(batches[0], str) else "no answer")
    return batches[0]


def _difference(choice: _Choice, scores: Array, indices: Array, limit: float) -> _Difference | None:
    """The worst of a node's choices that are not float32's own; None where all are.

    Args:
        choice: The node.
        scores: Float32's scores.
        indices: What the candidate chose.
        limit: How far apart two scores may be, in units of the largest one that float32 chooses.
    """
    rows, chosen = choice.rows(scores, indices)
    if rows.shape[:-1] != chosen.shape[:-1]:
        raise ExportError("the candidate chooses among other rows than float32")
    if choice.node.op_type == "TopK" and not choice.attribute("sorted", 1):
        order = np.argsort(np.take_along_axis(rows, chosen, -1), -1, kind="stable")
        chosen = np.take_along_axis(chosen, order, -1)
    own = np.argsort(rows, -1, kind="stable")[..., : chosen.shape[-1]]
    wanted, got = np.take_along_axis(rows, own, -1), np.take_along_axis(rows, chosen, -1)
    differing = own != chosen
    if not differing.any():
        return None
    with np.errstate(invalid="ignore"):  # two infinities
        gaps = np.where(wanted == got, 0.0, np.abs(got - wanted))
    gaps = np.where(np.isnan(gaps), np.inf, gaps)
    place = np.unravel_index(int(np.where(differing, gaps, -1.0).argmax()), gaps.shape)
    scale = max(float(np.abs(wanted[np.isfinite(wanted)]).max(initial=0.0)), FP16_SMALLEST_NORMAL)
    tied = bool(gaps[place] <= limit * scale)
    sign = -1.0 if choice.largest else 1.0
    text = (
        f"at {[int(index) for index in place]} {choice.title} takes index {int(chosen[place])} ({sign * got[place]:.9g}) and "
        f"float32 index {int(own[place])} ({sign * wanted[place]:.9g})"
    )
    return _Difference(text=f"{text}, a near-tie" if tied else text, tied=tied)
