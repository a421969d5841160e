"""Whether the float32 model itself leaves the budget when only its inputs are rounded: then no converter can help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onnx import TensorProto

from export.certificate.budget import Budget
from export.certificate.certificate import OutputVerdict
from export.errors import ExportError
from export.verification.comparison import Comparison
from export.verification.interface import inputs_of
from export.verification.judging import judge


@dataclass(frozen=True, kw_only=True)
class Steepness:
    """What rounding the inputs to float16 does to the float32 model.

    Attributes:
        violations: By how much its outputs leave the budget, in words; empty where they do not, or where nobody asked.
        half_inputs: Whether the candidate takes float16, so that nothing it does can be closer than that.
    """

    violations: tuple[str, ...] = ()
    half_inputs: bool = False

    @property
    def notes(self) -> tuple[str, ...]:
        """The same for a certificate."""
        return tuple(f"float32 itself, its inputs alone rounded to float16: {text}" for text in self.violations)


def steepness(comparison: Comparison, verdicts: Sequence[OutputVerdict], budget: Budget) -> Steepness:
    """Run the reference on rounded inputs, where an output is over budget on the user's samples."""
    offending = {verdict.name for verdict in verdicts if verdict.violations}
    if not offending:
        return Steepness()
    try:
        answers = comparison.on_rounded_inputs()
        judged = judge(comparison.outputs, "inputs rounded", comparison.expected, answers, budget).verdicts
    except ExportError:  # what it cannot answer says nothing about its numbers
        return Steepness()
    texts = (f"output {v.name!r}: {text}" for v in judged if v.name in offending for text in v.violations)
    types = [value.elem_type for value in inputs_of(comparison.candidate.outline)]
    return Steepness(violations=tuple(texts), half_inputs=TensorProto.FLOAT16 in types)
