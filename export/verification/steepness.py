"""Whether the float32 model itself leaves the budget, asked again or with its inputs rounded: then no converter can help."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from onnx import TensorProto

from export.certificate.budget import Budget
from export.certificate.certificate import OutputVerdict
from export.errors import ExportError
from export.verification.children import Value
from export.verification.comparison import Comparison
from export.verification.interface import inputs_of
from export.verification.judging import judge


@dataclass(frozen=True, kw_only=True)
class Steepness:
    """What rounding the inputs to float16 does to the float32 model.

    Attributes:
        violations: By how much its outputs leave the budget, in words; empty where they do not, or where nobody asked.
        half_inputs: Whether the candidate takes float16, so that nothing it does can be closer than that.
        unsteady: By how much its outputs leave the budget where it is given the very same once more; then nothing else is told.
    """

    violations: tuple[str, ...] = ()
    half_inputs: bool = False
    unsteady: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """The same for a certificate."""
        again = (f"float32 itself, asked a second time: {text}" for text in self.unsteady)
        return (*again, *(f"float32 itself, its inputs alone rounded to float16: {text}" for text in self.violations))


def steepness(comparison: Comparison, verdicts: Sequence[OutputVerdict], budget: Budget) -> Steepness:
    """Run the reference again, and on rounded inputs, where an output is over budget on the user's samples."""
    offending = {verdict.name for verdict in verdicts if verdict.violations}
    if not offending:
        return Steepness()
    try:
        if unsteady := _left(comparison, comparison.asked_again(), offending, budget):
            return Steepness(unsteady=unsteady)
        texts = _left(comparison, comparison.on_rounded_inputs(), offending, budget)
    except ExportError:  # what it cannot answer says nothing about its numbers
        return Steepness()
    types = [value.elem_type for value in inputs_of(comparison.candidate.outline)]
    return Steepness(violations=texts, half_inputs=TensorProto.FLOAT16 in types)


def _left(
    comparison: Comparison, answers: Sequence[list[Value]], offending: Collection[str], budget: Budget
) -> tuple[str, ...]:
    """How other answers of the reference leave the budget."""
    judged = judge(comparison.outputs, "float32", comparison.expected, answers, budget, comparison.yardsticks).verdicts
    return tuple(f"output {v.name!r}: {text}" for v in judged if v.name in offending for text in v.violations)
