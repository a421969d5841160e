"""Verdicts on adversarial samples, and how much headroom they show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from export.certificate.budget import Budget, adversarial_violations
from export.certificate.certificate import OutputVerdict
from export.certificate.verdicts import AdversarialVerdict
from export.verification.adversarial import Case
from export.verification.children import Value
from export.verification.columns import Yardstick, learned, yardstick_of
from export.verification.judging import Output
from export.verification.metrics import Array, compare
from export.weight_ledger import FP16_MAX


def judge_cases(
    cases: Sequence[Case],
    expected: Sequence[list[Value] | str],
    answers: Mapping[str, Sequence[list[Value] | str]],
    usual: Sequence[OutputVerdict],
    outputs: Sequence[Output],
    budget: Budget,
) -> tuple[AdversarialVerdict, ...]:
    """A line for every case, execution and output; one for the whole case where it cannot be judged.

    Args:
        cases: The adversarial batches.
        expected: The reference's answers to them, or the errors they end in.
        answers: Those of each execution of the candidate.
        usual: The verdicts on the user's samples, for what the outputs' errors are divided by.
        outputs: The candidate's outputs.
        budget: The limits.
    """
    yardsticks = {verdict.name: yardstick_of(verdict.figures) for verdict in usual}
    lines: list[AdversarialVerdict] = []
    for number, case in enumerate(cases):
        wanted = expected[number]
        if note := _unjudgeable(wanted):
            lines.append(AdversarialVerdict(case=case.name, execution="", output="", note=note, factor=case.factor))
            continue
        for execution, got in answers.items():
            lines += _lines(case, execution, outputs, (wanted, got[number]), yardsticks, budget)
    return tuple(lines)


def headroom(lines: Sequence[AdversarialVerdict]) -> float | None:
    """The largest factor up to which every larger input was within the adversarial budget; None where none was judged."""
    judged = [line for line in lines if line.factor is not None and line.note is None]
    if not judged:
        return None
    largest = 1.0
    for factor in sorted({line.factor for line in judged if line.factor is not None}):
        if any(line.violations for line in judged if line.factor == factor):
            break
        largest = factor
    return largest


def _unjudgeable(answer: list[Value] | str) -> str | None:
    if isinstance(answer, str):
        return f"the reference fails on it: {answer}"
    arrays = [array for value in answer for array in _floats(value)]
    largest = max((_largest(array) for array in arrays), default=0.0)
    if largest > FP16_MAX:
        return f"the reference itself answers {largest:.3g}, which float16 cannot hold"
    if arrays and not any(np.isfinite(array).any() for array in arrays):
        return "the reference itself answers nothing finite"
    return None


def _lines(
    case: Case,
    execution: str,
    outputs: Sequence[Output],
    answers: tuple[list[Value] | str, list[Value] | str],
    yardsticks: Mapping[str, Yardstick],
    budget: Budget,
) -> Iterator[AdversarialVerdict]:
    wanted, got = answers
    if isinstance(got, str) or isinstance(wanted, str):
        texts = (str(got),)
        yield AdversarialVerdict(case=case.name, execution=execution, output="", violations=texts, factor=case.factor)
        return
    for output, one, other in zip(outputs, wanted, got, strict=True):
        if not isinstance(one, np.ndarray) or not isinstance(other, np.ndarray):
            continue
        if one.shape != other.shape:
            if not output.data_dependent:
                text = f"shape {list(other.shape)}, the reference {list(one.shape)}"
                yield AdversarialVerdict(
                    case=case.name, execution=execution, output=output.name, violations=(text,), factor=case.factor
                )
            continue
        yardstick = yardsticks.get(output.name) or learned([one])
        figures = compare(one, other, yardstick.for_other_samples(one))
        yield AdversarialVerdict(
            case=case.name,
            execution=execution,
            output=output.name,
            figures=figures,
            violations=tuple(adversarial_violations(figures, yardstick.unit, budget)),
            factor=case.factor,
        )


def _floats(value: Value) -> list[Array]:
    arrays = value if isinstance(value, list) else [] if value is None else [value]
    return [array for array in arrays if array.dtype.kind == "f" and array.size]


def _largest(array: Array) -> float:
    finite = array[np.isfinite(array)]
    return float(np.abs(finite).max()) if finite.size else 0.0
