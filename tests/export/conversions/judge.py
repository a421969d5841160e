"""Judges whether a converted model is clean: checker, runtime, values, and types of inputs and outputs, for every converter.

Judge in a child process (`tests.export.conversions.crash_pool`): some conversions make ONNX Runtime crash.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx

from tests.export.conversions.cases import KINDS, Case, Value, cases, holds_float32
from tests.export.conversions.closeness import difference
from tests.export.conversions.io_types import wrong_io_type
from tests.export.conversions.runtime import Session, rounded

__all__ = ["KINDS", "Case", "Verdict", "cases", "judge", "judgeable", "references"]

STEPS = ("convert", "checker", "types", "load", "run", "value", "crash")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The judge's verdict.

    Attributes:
        ok: Whether the conversion is clean.
        step: The step that failed, one of `STEPS`; empty if it is clean.
        text: One line with the failure; empty if it is clean.
    """

    ok: bool
    step: str = ""
    text: str = ""


CLEAN = Verdict(ok=True)


def failed(step: str, error: object) -> Verdict:
    """A verdict from an exception or a text, cut to its first line."""
    text = str(error).strip().splitlines() or [type(error).__name__]
    return Verdict(ok=False, step=step, text=text[0][:300])


def judgeable(case: Case) -> bool:
    """Whether the case counts: it holds float32, the checker takes it, and ONNX Runtime's CPU runs it right."""
    model = onnx.load_from_string(case.model)
    if not holds_float32(model):
        return False
    try:
        onnx.checker.check_model(model, full_check=True)
        session = Session(case.model)
        answers = [session.run(inputs) for inputs in case.inputs]
    except Exception:  # noqa: BLE001  (whatever the runtime raises: it cannot run the case)
        return False
    if case.expected is None:
        return True
    pairs = zip(answers, case.expected, strict=True)
    return all(
        _as_expected(case, answer, wanted)
        for answer, expected in pairs
        for answer, wanted in zip(answer, expected, strict=True)
    )


def references(case: Case) -> Iterator[list[list[Value]]]:
    """The references of each output for each data set: float32's answers to the original inputs, and to the rounded ones."""
    session = Session(case.model)
    for inputs in case.inputs:
        runs = [session.run(inputs)]
        with contextlib.suppress(Exception):  # rounded inputs may be invalid, such as an infinite size
            runs.append(session.run({name: rounded(value) for name, value in inputs.items()}))
        yield [list(values) for values in zip(*runs, strict=True)]


def judge(case: Case, converted: bytes, keep_io: bool) -> Verdict:
    """Judge one conversion of a judgeable case."""
    try:
        original, model = onnx.load_from_string(case.model), onnx.load_from_string(converted)
        onnx.checker.check_model(model, full_check=True)
    except Exception as error:  # noqa: BLE001  (a converter's bytes may be anything)
        return failed("checker", error)
    wrong = wrong_io_type(original, model, keep_io=keep_io)
    if wrong is not None:
        return failed("types", wrong)
    try:
        session = Session(converted)
    except Exception as error:  # noqa: BLE001  (the runtime's own exceptions)
        return failed("load", error)
    return _values_verdict(case, session)


def _values_verdict(case: Case, session: Session) -> Verdict:
    for inputs, wanted in zip(case.inputs, references(case), strict=True):
        try:
            answers = session.run(inputs)
        except Exception as error:  # noqa: BLE001  (the runtime's own exceptions)
            return failed("run", error)
        for i, (answer, right) in enumerate(zip(answers, wanted, strict=True)):
            text = difference(answer, right)
            if text is not None:
                return failed("value", f"output {i}: {text}")
    return CLEAN


def _as_expected(case: Case, answer: Value, expected: Value) -> bool:
    """Compare by ONNX's own rule for its backend tests."""
    if isinstance(expected, list):
        same = isinstance(answer, list) and len(answer) == len(expected)
        return same and all(_as_expected(case, a, e) for a, e in zip(answer, expected, strict=True))
    if expected is None or answer is None or isinstance(expected, dict):
        return bool(expected is answer or expected == answer)
    a, e = np.asarray(answer), np.asarray(expected)
    if a.shape != e.shape or a.dtype != e.dtype:
        return False
    if not np.issubdtype(e.dtype, np.floating):
        return bool((a == e).all())
    return bool(np.allclose(a, e, rtol=case.rtol, atol=case.atol, equal_nan=True))
