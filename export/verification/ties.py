"""Settle ties: an fp16 model may choose another of two values that float32 itself hardly distinguishes.

TopK, ArgMax and ArgMin turn a difference far below rounding into another index, and a lookup by that index may return
anything: another expert's answer, another box. Adversarial samples are full of ties: zeros give many rows equal scores. Where
such a sample is over budget, the candidate's choices are read, and float32 runs again with these choices instead of its own.
The sample is within budget if float32's scores of both choices are within the allowed error and the outputs agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
from onnx import TensorProto, helper

from halfserve.export.certificate.budget import Budget
from halfserve.export.certificate.verdicts import AdversarialVerdict, OutputVerdict
from halfserve.export.export_errors import ExportError
from halfserve.export.half_types import FP16
from halfserve.export.onnx_files.model_file import open_model
from halfserve.export.verification.comparison import Comparison
from halfserve.export.verification.executions import INLINE_LIMIT_BYTES, for_cpu, run_as_on_cuda, run_simulated
from halfserve.export.verification.generated.adversarial import AdversarialCase
from halfserve.export.verification.judging import judge_cases
from halfserve.export.verification.samples import Array, Value
from halfserve.export.verification.sandbox import CUDA, LEVELS, RunResult, on_disk, open_reference
from halfserve.files.cuda_products import product_options

PREFIX = "halfserve/ties/"
INDICES = {"TopK": 1, "ArgMax": 0, "ArgMin": 0}  # the output of each operator that holds indices


@dataclass(frozen=True, kw_only=True)
class _Choice:
    """A node that chooses among scores, in both the float32 model and the candidate."""

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
        """Scores and chosen indices with choices along the last axis, negated where the node prefers large scores."""
        if self.node.op_type != "TopK" and not self.attribute("keepdims", 1):
            indices = np.expand_dims(indices, self.axis)
        moved = np.moveaxis(scores, self.axis, -1).astype(np.float64)
        return (-moved if self.largest else moved), np.moveaxis(indices, self.axis, -1)


@dataclass(frozen=True, kw_only=True)
class _Difference:
    """The choice furthest from float32's own, in words, and whether the two scores tie."""

    text: str
    tied: bool


@dataclass(frozen=True, kw_only=True)
class JudgedResults:
    """Verdicts on the user's samples and on the adversarial ones after ties are settled, and notes for the certificate."""

    outputs: tuple[OutputVerdict, ...]
    adversarial: tuple[AdversarialVerdict, ...]
    notes: tuple[str, ...]


def judge_results(comparison: Comparison, results: Mapping[str, RunResult], budget: Budget) -> JudgedResults:
    """Judge the candidate's results in each execution.

    Raises:
        ExportError: An execution failed on the user's samples, or the outputs do not correspond.
    """
    judged = [comparison.judge(name, comparison.user_answers(name, result), budget) for name, result in results.items()]
    outputs = tuple(verdict for each in judged for verdict in each.verdicts)
    edge = {name: comparison.case_answers(result) for name, result in results.items()}
    verdicts = judge_cases(
        comparison.cases, comparison.expected_cases, edge, outputs, comparison.outputs, budget, comparison.half
    )
    verdicts, ties = settle_ties(verdicts, comparison, outputs, budget)
    notes = (*dict.fromkeys(note for each in judged for note in each.notes), *ties)
    return JudgedResults(outputs=outputs, adversarial=verdicts, notes=notes)


def settle_ties(
    verdicts: Sequence[AdversarialVerdict],
    comparison: Comparison,
    user_verdicts: Sequence[OutputVerdict],
    budget: Budget,
) -> tuple[tuple[AdversarialVerdict, ...], tuple[str, ...]]:
    """Judge verdicts that are over budget again with the candidate's choices between ties.

    A verdict that remains over budget names the differing choice. Models over 256 MiB, and choices inside bodies of If, Loop
    and Scan, are not settled.

    Returns:
        The verdicts, and a note for each that is within budget only because of a tie.
    """
    over = {(verdict.execution, verdict.case) for verdict in verdicts if verdict.violations and verdict.output}
    choices = _choices(comparison) if over else []
    settled, notes = list(verdicts), []
    for number, case in enumerate(comparison.cases) if choices else ():
        for execution in [name for name, broken in sorted(over) if broken == case.name]:
            try:
                with_choices, difference = _verdicts_with_choices(
                    choices, (number, case), execution, comparison, user_verdicts, budget
                )
            except ExportError:  # a model that cannot run with other choices shows nothing about ties
                continue
            if difference is None:
                continue
            for place, verdict in enumerate(verdicts):
                if (verdict.execution, verdict.case) == (execution, case.name) and verdict.violations:
                    settled[place] = _settled(verdict, with_choices, difference)
                    if not settled[place].violations:
                        notes.append(f"output {verdict.output!r} on {case.name} ({execution}): {difference.text}")
    return tuple(settled), tuple(notes)


def _settled(
    verdict: AdversarialVerdict, with_choices: Sequence[AdversarialVerdict], difference: _Difference
) -> AdversarialVerdict:
    replayed = next((other for other in with_choices if other.output == verdict.output), verdict)
    if difference.tied and not replayed.violations:
        return replace(verdict, figures=replayed.figures, violations=())
    first, *others = verdict.violations
    rest = f", and differs by more than that choice: {replayed.violations[0]}" if difference.tied else ""
    return replace(verdict, violations=(f"{first}; {difference.text}{rest}", *others))


def _choices(comparison: Comparison) -> list[_Choice]:
    source, candidate = comparison.source, comparison.candidate
    if source is None or max(source.size_bytes, candidate.size_bytes) > INLINE_LIMIT_BYTES:
        return []
    theirs = {name for node in candidate.outline.graph.node if node.op_type in INDICES for name in node.output}
    nodes = [node for node in source.outline.graph.node if node.op_type in INDICES and not node.domain]
    found = [(node, node.output[INDICES[node.op_type]]) for node in nodes if len(node.output) > INDICES[node.op_type]]
    return [_Choice(node=node, indices=name) for node, name in found if name and name in theirs]


def _verdicts_with_choices(
    choices: Sequence[_Choice],
    numbered: tuple[int, AdversarialCase],
    execution: str,
    comparison: Comparison,
    user_verdicts: Sequence[OutputVerdict],
    budget: Budget,
) -> tuple[tuple[AdversarialVerdict, ...], _Difference | None]:
    """Verdicts on one case with float32 bound to the candidate's choices, and the worst difference from its own choices."""
    number, case = numbered
    count = len(comparison.outputs)
    got = _run_candidate(choices, number, execution, comparison)
    indices = [value for value in got[count:] if isinstance(value, np.ndarray)]
    if len(indices) != len(choices):
        raise ExportError("a choice has no result")
    bound = _run_bound(choices, indices, case, comparison)
    scores = [value for value in bound[count:] if isinstance(value, np.ndarray)]
    verdicts = judge_cases(
        [case], [bound[:count]], {execution: [got[:count]]}, user_verdicts, comparison.outputs, budget, comparison.half
    )
    limit = budget.max_scaled_error * budget.adversarial_factor
    differences = [
        _difference(*each, limit, comparison.half.smallest_normal) for each in zip(choices, scores, indices, strict=True)
    ]
    found = [difference for difference in differences if difference is not None]
    return verdicts, min(found, key=lambda difference: difference.tied, default=None)


def _run_candidate(choices: Sequence[_Choice], number: int, execution: str, comparison: Comparison) -> list[Value]:
    """Return the candidate's outputs on a case, then its chosen indices."""
    model = onnx.ModelProto()
    model.CopyFrom(comparison.candidate.proto)
    for place, choice in enumerate(choices):
        model.graph.node.append(helper.make_node("Identity", [choice.indices], [f"{PREFIX}indices{place}"]))
        model.graph.output.append(helper.make_tensor_value_info(f"{PREFIX}indices{place}", TensorProto.INT64, None))
    exposed, sandbox = open_model(model), comparison.sandbox
    staged = [comparison.staged[len(comparison.batches) + number]]
    if execution == "rounded":
        half, written = comparison.half, comparison.written
        simulated = run_simulated(exposed, sandbox, staged, user_batches=0, products=False, half=half, written=written)
        batches = simulated.answer.batches
    elif execution == "cuda":
        on_cuda = run_as_on_cuda(exposed, sandbox, staged, comparison.half)
        batches = () if on_cuda is None else on_cuda.batches
    elif execution == "gpu":
        options = product_options(exposed.outline)
        batches = sandbox.run(on_disk(exposed, sandbox), staged, level=LEVELS[0], provider=CUDA, options=options).batches
    else:
        batches = open_reference(for_cpu(comparison.of(exposed))[0], sandbox, staged)
    return _first(batches)


def _run_bound(
    choices: Sequence[_Choice], indices: Sequence[Array], case: AdversarialCase, comparison: Comparison
) -> list[Value]:
    """Float32's outputs on a case with the given indices, then the scores that its own choice is based on."""
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
    sandbox = comparison.sandbox
    return _first(open_reference(on_disk(open_model(model), sandbox), sandbox, sandbox.stage([feed])))


def _bound_nodes(choice: _Choice, given: str, scores: str) -> list[onnx.NodeProto]:
    """Return the replacement of a choosing node, which yields its input as the output `scores`."""
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


def _difference(
    choice: _Choice, scores: Array, indices: Array, limit: float, smallest: float = FP16.smallest_normal
) -> _Difference | None:
    """Return the worst of the candidate's choices `indices` that differ from float32's own; None where none does.

    `limit` is the largest distance of two tied scores, divided by the largest score that float32 chooses, or
    by `smallest` where that is smaller.
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
    scale = max(float(np.abs(wanted[np.isfinite(wanted)]).max(initial=0.0)), smallest)
    tied = bool(gaps[place] <= limit * scale)
    sign = -1.0 if choice.largest else 1.0
    text = (
        f"at {[int(index) for index in place]} {choice.title} takes index {int(chosen[place])} ({sign * got[place]:.9g}) and "
        f"float32 index {int(own[place])} ({sign * wanted[place]:.9g})"
    )
    return _Difference(text=f"{text}, a near-tie" if tied else text, tied=tied)
