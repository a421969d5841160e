"""Verdicts on a candidate's outputs, on the user's samples and on adversarial ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np

from halfserve.export.certificate.budget import (
    Budget,
    ErrorFigures,
    adversarial_violations,
    allowed_near_ties,
    disagrees,
    error_limit,
    unit_of,
    violations,
)
from halfserve.export.certificate.verdicts import AdversarialVerdict, OutputVerdict, Plot, TaskFigure
from halfserve.export.export_errors import ExportError
from halfserve.export.half_types import FP16, HalfType
from halfserve.export.verification.error_units import (
    FEWEST_VALUES,
    GAP,
    ErrorUnits,
    by_column,
    learned_units,
    recorded_units,
)
from halfserve.export.verification.generated.adversarial import AdversarialCase
from halfserve.export.verification.metrics import class_axis, compare, compare_parts
from halfserve.export.verification.samples import Array, Feed, Value

# Figures of the first output in a task's terms, from the batches, the reference's answers, the candidate's, and the limits.
Judge: TypeAlias = Callable[[Sequence[Feed], Sequence[Array], Sequence[Array], Budget], tuple[TaskFigure, ...]]

PLOT_POINTS = 300
PLOT_EDGES = tuple(-7 + 0.25 * step for step in range(33))  # errors of 1e-7 to 10 times the output's scale
PLOTTED_OUTPUTS = 8
CONSTANT = 2.0**-20  # a spread below this share of a column's mean is float32's own rounding


@dataclass(frozen=True, kw_only=True)
class ComparedOutput:
    """An output of the candidate.

    Attributes:
        name: The output's name.
        data_dependent: Whether its shape depends on the inputs' values, as after NonZero.
        vector: Whether the model's task judges its rows as a whole: then no column means anything alone, neither as the
            largest of a row nor as a quantity with a unit of its own.
    """

    name: str
    data_dependent: bool = False
    vector: bool = False


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The verdicts of one execution, and notes on what could not be compared."""

    verdicts: tuple[OutputVerdict, ...]
    notes: tuple[str, ...]


def judge(
    outputs: Sequence[ComparedOutput],
    execution: str,
    expected: Sequence[list[Value]],
    actual: Sequence[list[Value]],
    budget: Budget,
    output_units: Sequence[ErrorUnits] | None = None,
    half: HalfType = FP16,
) -> Judged:
    """Judge the answers to all batches; errors are divided by `output_units`, by default those learned from `expected`.

    Raises:
        ExportError: The models have different numbers of outputs, or outputs of different shapes.
    """
    verdicts: list[OutputVerdict] = []
    notes: list[str] = []
    for wanted, got in zip(expected, actual, strict=True):
        if len(wanted) != len(got):
            names = ", ".join(output.name for output in outputs)
            raise ExportError(f"the reference has {len(wanted)} outputs, the {half.short} model {len(got)}: {names}")
    for index, output in enumerate(outputs):
        pairs, differing = _pairs(output, [(w[index], g[index]) for w, g in zip(expected, actual, strict=True)])
        if not pairs and not differing:
            notes.append(f"output {output.name!r} ({execution}) is not a tensor, or is absent, and was not compared")
            continue
        broken: tuple[str, ...] = ()
        if differing:
            text = f"in {len(differing)} of {len(expected)} batches the {half.short} model gives {differing[0]}"
            notes.append(f"output {output.name!r} ({execution}): {text}; the common part was compared")
            broken = (text,) if len(differing) > (1 - budget.min_agreement) * len(expected) else ()
        if pairs:
            figures = _figures(output, pairs, None if output_units is None else output_units[index])
            notes += (f"output {output.name!r} ({execution}) {text}" for text in _remarks(figures, budget, half))
            notes += (f"output {output.name!r}: {text}" for text in _evidence(figures, budget, half))
            if figures.floating and not output.vector:
                notes += (f"output {output.name!r} ({execution}): {text}" for text in _offsets(pairs, half))
                notes += (f"output {output.name!r}: {text}" for text in _columns_apart(pairs, figures))
            plot = plot_of(pairs, unit_of(figures)) if index < PLOTTED_OUTPUTS and figures.floating else None
            broken = tuple(violations(figures, budget)) + broken
            verdicts.append(OutputVerdict(name=output.name, execution=execution, figures=figures, violations=broken, plot=plot))
    return Judged(verdicts=tuple(verdicts), notes=tuple(notes))


def _remarks(figures: ErrorFigures, budget: Budget, half: HalfType) -> Iterator[str]:
    if not figures.elements:
        yield "is empty on every sample, so nothing of it was compared"
    relative = figures.floating and budget.max_abs_error is None
    if relative and figures.max_abs_error > 0 and figures.scale < half.smallest_normal and figures.vanished is None:
        yield (
            f"is at most {figures.scale:.2g}, where {half.name} has few digits or none: its error was judged beside "
            f"{unit_of(figures):.2g}; give max_abs_error for a limit of your own"
        )
    if disagrees(figures, budget) and allowed_near_ties(figures, budget):
        yield (
            f"differs in the argmax of {figures.differing} of {figures.rows} rows, "
            f"{'which is a near-tie' if figures.differing == 1 else 'all near-ties'}: float32's two numbers there are at most "
            f"{figures.margin:.2g} apart, and an error of {error_limit(figures, budget):.2g} is allowed"
        )


def _evidence(figures: ErrorFigures, budget: Budget, half: HalfType) -> Iterator[str]:
    """Yield reasons why the reference's choices are no evidence; the same text in every execution."""
    if figures.nan_rows and not figures.mostly_nan:
        yield (
            f"float32 itself answers {figures.nan_rows} of {figures.all_rows} rows with NaN: these are left out, and the "
            "verdict is about the others"
        )
    if figures.floating and figures.constant_rows and not figures.rows:
        yield (
            f"float32 has the same argmax in all {figures.constant_rows} rows, one number for all classes, or the same answer "
            f"to every sample, as far as {half.name} tells: agreement there is no evidence, so it is said to be none"
        )
    elif figures.rows > 1 and figures.commonest >= budget.min_agreement * figures.rows and not disagrees(figures, budget):
        yield (
            f"float32 has the same argmax in {figures.commonest} of {figures.rows} rows: a model that always chose it would be "
            f"within the limit of {budget.min_agreement:g} too, so the agreement is no evidence; give samples of more classes"
        )


def _offsets(pairs: Sequence[tuple[Array, Array]], half: HalfType) -> Iterator[str]:
    """Columns far from 0 whose error is larger than the reference's own spread there: the half type does not hold what varies.

    Shares are left out: where a class is certain, its share hardly varies.
    """
    axis = class_axis(pairs[0][0].ndim)
    pairs = [pair for pair in pairs if pair[0].size]
    tables = [[by_column(side, axis) if side.ndim > 1 else side.reshape(-1, 1) for side in pair] for pair in pairs]
    if len({side.shape[1] for pair in tables for side in pair}) != 1:
        return
    reference, candidate = (np.concatenate(side) for side in zip(*tables, strict=True))
    finite = np.isfinite(reference).all(0) & np.isfinite(candidate).all(0)
    if len(reference) < FEWEST_VALUES or not finite.any():
        return
    with np.errstate(invalid="ignore", over="ignore"):
        middle, spread = reference.mean(0, dtype=np.float64), reference.std(0, dtype=np.float64)
        error = np.abs(candidate.astype(np.float64) - reference).max(0)
        shares = (reference >= 0).all(0) & (reference <= 1).all(0)
    far = finite & ~shares & (np.abs(middle) >= GAP * spread) & (spread > CONSTANT * np.abs(middle))
    columns = np.flatnonzero(far & (error > spread))
    if not len(columns):
        return
    worst = columns[np.argmax(error[columns] / spread[columns])]
    more = f" and {len(columns) - 1} more columns" if len(columns) > 1 else ""
    place = f"column {worst} on axis {axis}{more}" if axis > 0 else "it"
    yield (
        f"{place} is {middle[worst]:.5g} with a spread of {spread[worst]:.2g} in float32, and the error there reaches "
        f"{error[worst]:.2g}: {half.name} does not hold what varies there; subtract the mean in the model, or keep its last "
        "layer in float32"
    )


def _columns_apart(pairs: Sequence[tuple[Array, Array]], figures: ErrorFigures) -> Iterator[str]:
    """Yield a column that is the largest in every row and so much larger that the choices are judged without it."""
    alone = [first for kind in figures.kinds for first, last in kind.columns if len(kind.columns) == 1 and first == last]
    if figures.axis is None or not figures.rows or not alone:
        return
    largest = {int(column) for wanted, _ in pairs for column in np.unique(wanted.argmax(figures.axis))}
    if len(largest) == 1 and (column := largest.pop()) in alone and len(figures.kinds) > 1:
        yield (
            f"column {column} on axis {figures.axis} is the largest in all rows, and far from the others: that float32 always "
            "chooses it is no evidence, and the agreement is that of the other columns"
        )


def plot_of(pairs: Sequence[tuple[Array, Array]], unit: float) -> Plot | None:
    """Return the data of an output's plots, with errors in the given unit; None where no number is finite."""
    reference, candidate = (
        np.concatenate([np.asarray(side, np.float64).ravel() for side in sides]) for sides in zip(*pairs, strict=True)
    )
    finite = np.isfinite(reference) & np.isfinite(candidate)
    reference, candidate = reference[finite], candidate[finite]
    if not reference.size:
        return None
    error = np.abs(candidate - reference) / unit
    logarithms = np.log10(np.maximum(error, 10.0 ** PLOT_EDGES[0]))
    counts = np.histogram(np.minimum(logarithms, PLOT_EDGES[-1]), PLOT_EDGES)[0]
    chosen = _plotted_places(reference, error)
    return Plot(
        reference=tuple(float(f"{value:.6g}") for value in reference[chosen]),
        candidate=tuple(float(f"{value:.6g}") for value in candidate[chosen]),
        edges=PLOT_EDGES,
        counts=tuple(int(count) for count in counts),
    )


def _plotted_places(reference: Array, error: Array) -> Array:
    """Return indices of the largest errors, the largest values and an even selection, in order."""
    if reference.size <= PLOT_POINTS:
        return np.arange(reference.size)
    share = PLOT_POINTS // 3
    largest = [np.argpartition(values, -share)[-share:] for values in (error, np.abs(reference))]
    even = np.linspace(0, reference.size - 1, PLOT_POINTS - 2 * share).astype(int)
    places: Array = np.unique(np.concatenate([*largest, even]))
    return places


def units_by_output(
    outputs: Sequence[ComparedOutput], expected: Sequence[list[Value]], half: HalfType = FP16
) -> tuple[ErrorUnits, ...]:
    """Learn each output's units from the reference's answers to all batches."""
    answers = [[(batch[index], batch[index]) for batch in expected] for index in range(len(outputs))]
    pairs = [_pairs(output, own)[0] for output, own in zip(outputs, answers, strict=True)]
    units = [learned_units([wanted for wanted, _ in own], half) for own in pairs]
    return tuple(
        replace(own, axis=None, kinds=()) if output.vector else own for output, own in zip(outputs, units, strict=True)
    )


def _figures(output: ComparedOutput, pairs: Sequence[tuple[Array, Array]], units: ErrorUnits | None) -> ErrorFigures:
    try:
        figures = compare_parts(pairs, units)
    except ValueError as error:
        raise ExportError(f"output {output.name!r}: {error}; is this the model that was converted?") from error
    if not output.vector:
        return figures
    vanished = figures.vanished if figures.vanished is not None and figures.vanished.axis is None else None
    return replace(figures, agreement=None, rows=0, differing=0, margin=0.0, constant_rows=0, commonest=0, vanished=vanished)


def _pairs(output: ComparedOutput, values: Sequence[tuple[Value, Value]]) -> tuple[list[tuple[Array, Array]], list[str]]:
    """Return the comparable parts of an output, and in words where the candidate's answer differs in a shape that depends on
    data.
    """
    pairs: list[tuple[Array, Array]] = []
    differing: list[str] = []
    for wanted, got in values:
        if isinstance(wanted, list) or isinstance(got, list):
            wanted_items, got_items = (item if isinstance(item, list) else [] for item in (wanted, got))
            if len(wanted_items) != len(got_items):
                differing.append(f"{len(got_items)} items, the reference {len(wanted_items)}")
            both = list(zip(wanted_items, got_items, strict=False))
            pairs += both or [_empty(item) for item in (wanted_items or got_items)[:1]]
        elif wanted is None or got is None:
            given = wanted if got is None else got
            if given is not None:
                differing.append("no tensor, the reference one" if got is None else "a tensor, the reference none")
                pairs.append(_empty(given))
        elif output.data_dependent and wanted.shape != got.shape and wanted.ndim == got.ndim:
            differing.append(f"shape {list(got.shape)}, the reference {list(wanted.shape)}")
            common = tuple(slice(min(sizes)) for sizes in zip(wanted.shape, got.shape, strict=True))
            pairs.append((wanted[common], got[common]))
        else:
            pairs.append((wanted, got))
    return pairs, differing


def _empty(array: Array) -> tuple[Array, Array]:
    """Return the common part of an answer that only one model gives: nothing, of its dtype."""
    return array.ravel()[:0], array.ravel()[:0]


def judge_cases(
    cases: Sequence[AdversarialCase],
    expected: Sequence[list[Value] | str],
    answers: Mapping[str, Sequence[list[Value] | str]],
    user_verdicts: Sequence[OutputVerdict],
    outputs: Sequence[ComparedOutput],
    budget: Budget,
    half: HalfType = FP16,
) -> tuple[AdversarialVerdict, ...]:
    """Return verdicts for every case, execution (key of `answers`) and output; one verdict for a case that cannot be judged.

    Answers may be errors. The verdicts on the user's samples, `user_verdicts`, hold the units of errors.
    """
    output_units = {verdict.name: recorded_units(verdict.figures, half) for verdict in user_verdicts}
    verdicts: list[AdversarialVerdict] = []
    for number, case in enumerate(cases):
        wanted = expected[number]
        if note := _unjudgeable(wanted, half):
            verdicts.append(AdversarialVerdict(case=case.name, execution="", output="", note=note, factor=case.factor))
            continue
        for execution, got in answers.items():
            verdicts += _case_verdicts(case, execution, outputs, (wanted, got[number]), output_units, budget, half)
    return tuple(verdicts)


def headroom(verdicts: Sequence[AdversarialVerdict]) -> float | None:
    """Return the largest factor up to which all larger inputs stayed within the adversarial budget; None where none
    was judged.
    """
    judged = [verdict for verdict in verdicts if verdict.factor is not None and verdict.note is None]
    if not judged:
        return None
    largest = 1.0
    for factor in sorted({verdict.factor for verdict in judged if verdict.factor is not None}):
        if any(verdict.violations for verdict in judged if verdict.factor == factor):
            break
        largest = factor
    return largest


def _unjudgeable(answer: list[Value] | str, half: HalfType) -> str | None:
    if isinstance(answer, str):
        return f"float32 itself fails on it: {answer}"
    arrays = [array for value in answer for array in _floats(value)]
    largest = max((_largest(array) for array in arrays), default=0.0)
    if largest > half.largest:
        return f"float32 itself answers {largest:.3g}, which {half.name} cannot hold"
    if arrays and not any(np.isfinite(array).any() for array in arrays):
        return "float32 itself answers nothing finite"
    return None


def _case_verdicts(
    case: AdversarialCase,
    execution: str,
    outputs: Sequence[ComparedOutput],
    answers: tuple[list[Value] | str, list[Value] | str],
    output_units: Mapping[str, ErrorUnits],
    budget: Budget,
    half: HalfType,
) -> Iterator[AdversarialVerdict]:
    make = partial(AdversarialVerdict, case=case.name, execution=execution, factor=case.factor)
    wanted, got = answers
    if isinstance(got, str) or isinstance(wanted, str):
        yield make(output="", violations=(str(got),))
        return
    for output, one, other in zip(outputs, wanted, got, strict=True):
        if not isinstance(one, np.ndarray) or not isinstance(other, np.ndarray):
            continue
        if one.shape != other.shape:
            if not output.data_dependent:
                text = f"shape {list(other.shape)}, the reference {list(one.shape)}"
                yield make(output=output.name, violations=(text,))
            continue
        units = output_units.get(output.name) or learned_units([one], half)
        figures = compare(one, other, units.for_other_samples(one))
        broken = adversarial_violations(figures, units.unit, budget, half.smallest_normal)
        yield make(output=output.name, figures=figures, violations=tuple(broken))


def _floats(value: Value) -> list[Array]:
    arrays = value if isinstance(value, list) else [] if value is None else [value]
    return [array for array in arrays if array.dtype.kind == "f" and array.size]


def _largest(array: Array) -> float:
    finite = array[np.isfinite(array)]
    return float(np.abs(finite).max()) if finite.size else 0.0
