"""From two models' answers to verdicts, output by output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from export.certificate.budget import Budget, disagrees, error_limit, lone_near_tie, unit_of, violations
from export.certificate.certificate import OutputVerdict
from export.certificate.figures import Figures
from export.certificate.verdicts import Plot
from export.errors import ExportError
from export.verification.children import Value
from export.verification.columns import Yardstick, learned
from export.verification.metrics import Array, compare_parts
from export.weight_ledger import FP16_SMALLEST_NORMAL

PLOT_POINTS = 300
PLOT_EDGES = tuple(-7 + 0.25 * step for step in range(33))  # errors of 1e-7 to 10 times the output's scale
PLOTTED_OUTPUTS = 8


@dataclass(frozen=True, kw_only=True)
class Output:
    """An output of the candidate: its name, and whether its shape depends on the values that go in, as of a NonZero."""

    name: str
    data_dependent: bool = False


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The verdicts of one execution, and what could not be compared."""

    verdicts: tuple[OutputVerdict, ...]
    notes: tuple[str, ...]


def judge(
    outputs: Sequence[Output],
    execution: str,
    expected: Sequence[list[Value]],
    actual: Sequence[list[Value]],
    budget: Budget,
    yardsticks: Sequence[Yardstick] | None = None,
) -> Judged:
    """Compare the answers to all batches.

    Args:
        outputs: The candidate's outputs.
        execution: How it was run, for the verdicts.
        expected: The reference's answers.
        actual: The candidate's.
        budget: The limits.
        yardsticks: What each output's errors are divided by; by default learned from `expected`.

    Raises:
        ExportError: The two do not answer alike: another number of outputs, or other shapes.
    """
    verdicts: list[OutputVerdict] = []
    notes: list[str] = []
    for wanted, got in zip(expected, actual, strict=True):
        if len(wanted) != len(got):
            names = ", ".join(output.name for output in outputs)
            raise ExportError(f"the reference has {len(wanted)} outputs, the fp16 model {len(got)}: {names}")
    for index, output in enumerate(outputs):
        pairs, differing = _pairs(output, [(w[index], g[index]) for w, g in zip(expected, actual, strict=True)])
        if not pairs and not differing:
            notes.append(f"output {output.name!r} ({execution}) is no tensor, or absent, and was not compared")
            continue
        broken: tuple[str, ...] = ()
        if differing:
            text = f"in {len(differing)} of {len(expected)} batches the fp16 model gives {differing[0]}"
            notes.append(f"output {output.name!r} ({execution}): {text}; what both have was compared")
            broken = (text,) if len(differing) > (1 - budget.min_agreement) * len(expected) else ()
        if pairs:
            figures = _figures(output, pairs, None if yardsticks is None else yardsticks[index])
            notes += (f"output {output.name!r} ({execution}) {text}" for text in _remarks(figures, budget))
            plot = plot_of(pairs, unit_of(figures)) if index < PLOTTED_OUTPUTS and figures.floating else None
            broken = tuple(violations(figures, budget)) + broken
            verdicts.append(OutputVerdict(name=output.name, execution=execution, figures=figures, violations=broken, plot=plot))
    return Judged(verdicts=tuple(verdicts), notes=tuple(notes))


def _remarks(figures: Figures, budget: Budget) -> Iterator[str]:
    """What a verdict within budget does not say by itself."""
    if not figures.elements:
        yield "is empty on every sample, so nothing of it was compared"
    relative = figures.floating and budget.max_abs_error is None
    if relative and figures.max_abs_error > 0 and figures.scale < FP16_SMALLEST_NORMAL and figures.vanished is None:
        yield (
            f"is at most {figures.scale:.2g}, where float16 has few digits or none: its error was judged beside "
            f"{unit_of(figures):.2g}; give max_abs_error for a limit of your own"
        )
    if figures.floating and figures.constant_rows and not figures.rows:
        yield (
            "has one number for all classes in float32, or the same answer to every sample, as far as float16 tells: "
            "agreement there is no evidence, so it is said to be none"
        )
    if disagrees(figures, budget) and lone_near_tie(figures, budget):
        yield (
            f"differs in the argmax of 1 of {figures.rows} rows, which is a near-tie: float32's two numbers there are "
            f"{figures.margin:.2g} apart, and an error of {error_limit(figures, budget):.2g} is allowed"
        )


def plot_of(pairs: Sequence[tuple[Array, Array]], unit: float) -> Plot | None:
    """What the plots of one output are drawn from, errors in the given unit; None where no number is finite."""
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
    chosen = _telling(reference, error)
    return Plot(
        reference=tuple(float(f"{value:.6g}") for value in reference[chosen]),
        candidate=tuple(float(f"{value:.6g}") for value in candidate[chosen]),
        edges=PLOT_EDGES,
        counts=tuple(int(count) for count in counts),
    )


def _telling(reference: Array, error: Array) -> Array:
    """Places of the largest errors, of the largest values, and evenly spread ones, in order."""
    if reference.size <= PLOT_POINTS:
        return np.arange(reference.size)
    share = PLOT_POINTS // 3
    largest = [np.argpartition(values, -share)[-share:] for values in (error, np.abs(reference))]
    even = np.linspace(0, reference.size - 1, PLOT_POINTS - 2 * share).astype(int)
    places: Array = np.unique(np.concatenate([*largest, even]))
    return places


def learned_yardsticks(outputs: Sequence[Output], expected: Sequence[list[Value]]) -> tuple[Yardstick, ...]:
    """What each output's errors are divided by, learned from the reference's answers to all batches."""
    answers = [[(batch[index], batch[index]) for batch in expected] for index in range(len(outputs))]
    pairs = [_pairs(output, own)[0] for output, own in zip(outputs, answers, strict=True)]
    return tuple(learned([wanted for wanted, _ in own]) for own in pairs)


def _figures(output: Output, pairs: Sequence[tuple[Array, Array]], yardstick: Yardstick | None) -> Figures:
    try:
        return compare_parts(pairs, yardstick)
    except ValueError as error:
        raise ExportError(f"output {output.name!r}: {error}; is this the model that was converted?") from error


def _pairs(output: Output, values: Sequence[tuple[Value, Value]]) -> tuple[list[tuple[Array, Array]], list[str]]:
    """What can be compared, and how the fp16 model's answer differs in shape where the data decide it."""
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
    """What an answer that only one of the two gives has in common with the other: nothing, of its type."""
    return array.ravel()[:0], array.ravel()[:0]
