"""A reference and a candidate on the same batches, and the stability of the reference's own answers.

Dynamic quantisation turns a change in the last bit of a float32 number into a whole quantisation step, so a reference may
answer differently when its inputs change in their last bits or its sums run in another order. Such changes are the
reference's noise, and the candidate's errors are judged beside it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx

from halfserve.export.certificate.budget import Budget
from halfserve.export.certificate.verdicts import OutputVerdict
from halfserve.export.export_errors import ExportError
from halfserve.export.half_types import FP16, HalfType
from halfserve.export.onnx_files.model_file import ModelFile, ModelSource, open_model
from halfserve.export.onnx_files.proto_graphs import bodies
from halfserve.export.verification.error_units import NOISE_FACTOR, ErrorUnits, with_noise
from halfserve.export.verification.generated.adversarial import AdversarialCase
from halfserve.export.verification.judging import ComparedOutput, Judged, judge, units_by_output
from halfserve.export.verification.metrics import compare
from halfserve.export.verification.samples import Array, Feed, Feeds, Value, as_array, inputs_of
from halfserve.export.verification.sandbox import CUDA, LEVELS, RunResult, Sandbox, StagedFeed, on_disk, open_reference
from halfserve.files.cuda_products import product_options

if TYPE_CHECKING:
    from torch import nn

    from halfserve.export.verification.judging import Judge

_SOURCES = frozenset({"Compress", "Loop", "NonMaxSuppression", "NonZero", "StringSplit", "Unique"})
NUDGES = 3
NUDGE_STEPS = 4
# In units. A reference that moves by more proves nothing, so this noise is not allowed for.
LARGEST_NOISE = 0.05


class Comparison:
    """Both models' answers to the user's batches, then to the adversarial batches, always in this order.

    Attributes:
        candidate: The half-precision model.
        half: The type that it is computed in.
        written: The type in which it is written.
        source: The float32 ONNX model: the reference itself, or the model that the candidate was converted from, where known.
        sandbox: Runs the models.
        staged: All batches, as files.
        outputs: The candidate's outputs.
        expected: The reference's answers to the user's batches.
        expected_cases: The reference's answers, or errors, on the adversarial batches.
        output_units: Divisors of each output's errors; replaced where the reference's noise is allowed for.
        batches: The user's batches.
        cases: The adversarial batches.
        onnx_reference: The reference, where it is an ONNX model.
        notes: Notes on the reference for the certificate.
    """

    def __init__(
        self,
        reference: nn.Module | ModelSource | ModelFile,
        candidate: ModelFile,
        sandbox: Sandbox,
        feeds: Feeds,
        cases: Sequence[AdversarialCase],
        source: ModelFile | None = None,
        task: Judge | None = None,
        half: HalfType = FP16,
        written: HalfType | None = None,
    ) -> None:
        self.candidate, self._task, self.half, self.written = candidate, task, half, written or half
        self._reference: nn.Module | ModelFile = (
            open_model(reference) if isinstance(reference, onnx.ModelProto | bytes | str | Path) else reference
        )
        self.onnx_reference = self._reference if isinstance(self._reference, ModelFile) else None
        self.source = self.onnx_reference or source
        self.sandbox = sandbox
        self._user_batches = len(feeds.batches)
        self.batches, self.cases = feeds.batches, tuple(cases)
        batches = [*feeds.batches, *(case.feed for case in cases)]
        self.staged = sandbox.stage(batches)
        self.outputs = _outputs(candidate.outline.graph, vectors=task is not None)
        answers = self._reference_answers(batches, self.staged)
        self.notes = self._notes(answers)
        self.expected = whole(answers[: self._user_batches], "the reference model")
        self.expected_cases = tuple(answers[self._user_batches :])
        self.output_units = units_by_output(self.outputs, self.expected, half)

    def of(self, candidate: ModelFile) -> Comparison:
        """Return a comparison of another candidate that shares reference, batches and answers."""
        other = copy(self)
        other.candidate = candidate
        vars(other).pop("path", None)
        return other

    def in_precision(self, half: HalfType) -> Comparison:
        """Return a comparison of the same candidate computed in another type."""
        other = copy(self)
        other.half = half
        other.output_units = units_by_output(self.outputs, self.expected, half)
        return other

    @cached_property
    def path(self) -> Path:
        """The candidate's file; an ExportError where it cannot be written."""
        return on_disk(self.candidate, self.sandbox)

    def user_answers(self, execution: str, answer: RunResult) -> list[list[Value]]:
        """Return an execution's answers to the user's batches.

        Raises:
            ExportError: The model crashed, was refused, or failed on a batch.
        """
        if answer.trouble is not None and len(answer.batches) < self._user_batches:
            raise ExportError(f"the {self.half.short} model ({execution}) cannot be run: {answer.trouble}")
        return whole(answer.batches[: self._user_batches], f"the {self.half.short} model ({execution})")

    def case_answers(self, answer: RunResult) -> tuple[list[Value] | str, ...]:
        """Return an execution's answers to the adversarial batches; batches after a crash hold its text."""
        reached = answer.batches[self._user_batches :]
        missing = len(self.staged) - self._user_batches - len(reached)
        return (*reached, *([answer.trouble or "not run"] * missing))

    def judge(self, execution: str, answers: Sequence[list[Value]], budget: Budget) -> Judged:
        """Judge answers to the user's batches, the first output in the terms of the model's task too."""
        judged = judge(self.outputs, execution, self.expected, answers, budget, self.output_units, self.half)
        if self._task is None or not judged.verdicts:
            return judged
        expected, actual = ([as_array(batch[0]) for batch in batches] for batches in (self.expected, answers))
        figures = self._task(self.batches, expected, actual, budget)
        broken = tuple(figure.violation for figure in figures if figure.violation is not None)
        first, *others = judged.verdicts
        return replace(judged, verdicts=(replace(first, violations=(*first.violations, *broken), task=figures), *others))

    def on_cuda(self) -> RunResult | None:
        """Return the candidate's result on a GPU, as the server runs it; None where ONNX Runtime cannot use one."""
        options = product_options(self.candidate.outline)
        answer = self.sandbox.run(self.path, self.staged, level=LEVELS[0], provider=CUDA, options=options)
        return answer if CUDA in answer.providers or answer.crash else None

    def second_run(self) -> list[list[Value]]:
        """Return a second run of the reference on the user's batches; answers differ where it keeps state or is random.

        An ONNX reference is not run again: it has no state, and ONNX Runtime draws the same numbers in every process.
        """
        if isinstance(self._reference, ModelFile):
            return self.expected
        return whole(self._reference_answers(self.batches, self.staged[: self._user_batches]), "the reference model")

    def on_rounded_inputs(self) -> list[list[Value]]:
        """Return the reference's answers to the user's batches with their floats rounded to the half type; see `answers_to`."""
        return self.answers_to([{name: self.half.rounded(array) for name, array in batch.items()} for batch in self.batches])

    def answers_to(self, batches: Sequence[Feed]) -> list[list[Value]]:
        """Return the reference's answers to other batches; an ExportError where it fails on one."""
        return whole(self._reference_answers(batches, self.sandbox.stage(batches)), "the reference model")

    def at_another_level(self) -> Iterator[list[list[Value]]]:
        """Yield an ONNX reference's answers without fusions, so that its sums run in another order; nothing for a
        torch module.
        """
        if isinstance(self._reference, ModelFile):
            answers = self._onnx_answers(self._reference, self.staged[: self._user_batches], LEVELS[-1:])
            yield whole(answers, "the reference model")

    def _reference_answers(self, batches: Sequence[Feed], staged: Sequence[StagedFeed]) -> Sequence[list[Value] | str]:
        if isinstance(self._reference, ModelFile):
            return self._onnx_answers(self._reference, staged)
        from halfserve.export.verification.torch_reference import run_torch  # noqa: PLC0415  (torch is slow to import)

        return run_torch(self._reference, batches)

    def _notes(self, answers: Sequence[list[Value] | str]) -> tuple[str, ...]:
        if isinstance(self._reference, ModelFile):
            return ()
        from halfserve.export.verification.torch_reference import fast_path_note  # noqa: PLC0415  (as above)

        return fast_path_note(self._reference, self.batches, answers)

    def _onnx_answers(
        self, reference: ModelFile, batches: Sequence[StagedFeed], levels: Sequence[str] = LEVELS
    ) -> Sequence[list[Value] | str]:
        theirs = [value.name for value in inputs_of(reference.outline)]
        ours = [value.name for value in inputs_of(self.candidate.outline)]
        if len(theirs) != len(ours):
            both = f"{len(theirs)} inputs ({', '.join(theirs)}), the {self.half.short} model {len(ours)} ({', '.join(ours)})"
            raise ExportError(f"the reference takes {both}; is this the model that was converted?")
        names = dict(zip(ours, ours if set(theirs) == set(ours) else theirs, strict=True))
        staged: list[StagedFeed] = [{names[name]: file for name, file in feed.items()} for feed in batches]
        return open_reference(on_disk(reference, self.sandbox), self.sandbox, staged, levels)


def whole(answers: Sequence[list[Value] | str], who: str) -> list[list[Value]]:
    """Return answers of which none may be an error; an ExportError names the model, `who`, whose batch ended in one."""
    for answer in answers:
        if isinstance(answer, str):
            raise ExportError(f"{who} fails on the samples: {answer}")
    return [answer for answer in answers if not isinstance(answer, str)]


def _outputs(graph: onnx.GraphProto, *, vectors: bool) -> list[ComparedOutput]:
    """Return the graph's outputs; `vectors`: whether a task judges the first one's rows as a whole."""
    dependent = data_dependent_values(graph)
    return [
        ComparedOutput(name=value.name, data_dependent=value.name in dependent, vector=vectors and index == 0)
        for index, value in enumerate(graph.output)
    ]


def data_dependent_values(graph: onnx.GraphProto) -> set[str]:
    """Return names of values whose shape may depend on the data: all that derive from a node such as NonZero."""
    dependent: set[str] = set()
    for node in graph.node:
        if node.op_type in _SOURCES or not dependent.isdisjoint(node.input) or any(map(_has_source, bodies(node))):
            dependent.update(name for name in node.output if name)
    return dependent


def _has_source(graph: onnx.GraphProto) -> bool:
    return any(node.op_type in _SOURCES or any(map(_has_source, bodies(node))) for node in graph.node)


def allow_reference_noise(comparison: Comparison, budget: Budget) -> tuple[str, ...]:
    """Measure the reference's noise and allow for it in the comparison's `output_units`.

    Returns:
        A note for each output whose noise matters; empty where none does, or where the reference is not deterministic.
    """
    try:
        repeated = comparison.judge("float32", comparison.second_run(), budget)
        if any(verdict.violations for verdict in repeated.verdicts):
            return ()
        moved = [*comparison.at_another_level(), *(comparison.answers_to(batches) for batches in _nudged(comparison))]
    except ExportError:  # a batch without an answer says nothing about noise
        return ()
    limit = budget.max_scaled_error
    found: list[ErrorUnits] = []
    notes: list[str] = []
    for index, (output, units) in enumerate(zip(comparison.outputs, comparison.output_units, strict=True)):
        noise = _noise(index, units, comparison.expected, moved)
        allowed = with_noise(units, noise, limit, LARGEST_NOISE)
        matters = _units(allowed) != _units(units)
        found.append(allowed if matters else units)
        if matters:
            notes.append(
                f"output {output.name!r}: float32's own answers move by up to {max(noise):.3g} when its inputs change in their "
                f"last bits or its sums are taken in another order, so {NOISE_FACTOR:g} times that is allowed"
            )
    comparison.output_units = tuple(found)
    return tuple(notes)


def _nudged(comparison: Comparison) -> Iterator[Sequence[dict[str, Array]]]:
    """Yield the user's batches with every float32 number moved by a few steps at random."""
    for seed in range(NUDGES):
        random = np.random.default_rng(seed)
        yield [{name: _steps_away(array, random) for name, array in batch.items()} for batch in comparison.batches]


def _steps_away(array: Array, random: np.random.Generator) -> Array:
    if array.dtype != np.float32:
        return array
    steps = random.integers(-NUDGE_STEPS, NUDGE_STEPS + 1, array.shape)
    with np.errstate(over="ignore", invalid="ignore"):
        moved: Array = array * (1 + steps * np.finfo(np.float32).eps / 2).astype(np.float64)
        return moved.astype(np.float32)


def _noise(
    index: int, units: ErrorUnits, expected: Sequence[list[Value]], moved: Sequence[Sequence[list[Value]]]
) -> tuple[float, ...]:
    """Return the largest change of one output, per kind of columns."""
    largest = [0.0] * (len(units.kinds) or 1)
    for answers in moved:
        for batch, other in zip(expected, answers, strict=True):
            one, two = batch[index], other[index]
            if not isinstance(one, np.ndarray) or not isinstance(two, np.ndarray) or one.shape != two.shape or not one.size:
                continue
            figures = compare(one, two, units)
            errors = [kind.max_abs_error for kind in figures.kinds] or [figures.max_abs_error] * len(largest)
            largest = [max(a, b) if np.isfinite(b) else a for a, b in zip(largest, errors, strict=True)]
    return tuple(largest)


def _units(units: ErrorUnits) -> Sequence[float]:
    return [kind.unit for kind in units.kinds] or [units.unit]


@dataclass(frozen=True, kw_only=True)
class ReferenceSensitivity:
    """How the float32 reference changes when it runs again, or on inputs rounded to half precision.

    Attributes:
        violations: Violations of the budget on rounded inputs; empty where there are none or it was not measured.
        half_inputs: Whether the candidate takes half-precision inputs, so that it cannot be closer than this.
        nondeterministic: Violations of the budget in a second run on the same inputs; then `violations` is not measured.
        half: The type that inputs were rounded to.
    """

    violations: tuple[str, ...] = ()
    half_inputs: bool = False
    nondeterministic: tuple[str, ...] = ()
    half: HalfType = FP16

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the certificate."""
        repeated = (f"float32 itself, asked a second time: {text}" for text in self.nondeterministic)
        return (
            *repeated,
            *(f"float32 itself, its inputs alone rounded to {self.half.name}: {text}" for text in self.violations),
        )


def reference_sensitivity(comparison: Comparison, verdicts: Sequence[OutputVerdict], budget: Budget) -> ReferenceSensitivity:
    """Measure the reference where an output of the candidate is over budget on the user's samples."""
    offending = {verdict.name for verdict in verdicts if verdict.violations}
    if not offending:
        return ReferenceSensitivity()
    try:
        if nondeterministic := _violations_by_output(comparison, comparison.second_run(), offending, budget):
            return ReferenceSensitivity(nondeterministic=nondeterministic)
        texts = _violations_by_output(comparison, comparison.on_rounded_inputs(), offending, budget)
    except ExportError:  # a batch without an answer says nothing about sensitivity
        return ReferenceSensitivity()
    types = [value.elem_type for value in inputs_of(comparison.candidate.outline)]
    return ReferenceSensitivity(violations=texts, half_inputs=comparison.written.elem_type in types, half=comparison.half)


def _violations_by_output(
    comparison: Comparison, answers: Sequence[list[Value]], offending: Collection[str], budget: Budget
) -> tuple[str, ...]:
    judged = comparison.judge("float32", answers, budget).verdicts
    return tuple(f"output {v.name!r}: {text}" for v in judged if v.name in offending for text in v.violations)
