"""How far the reference's own answers move by rounding alone: the least difference that says anything.

Dynamic quantisation turns a change in the last bit of a float32 number into a whole quantisation step, so a model answers
differently where its inputs change in their last bits, or its sums are taken in another order. What moves that far by itself
cannot be held against a candidate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from export.certificate.budget import Budget
from export.errors import ExportError
from export.verification.children import Value
from export.verification.columns import NOISE_FACTOR, Yardstick, with_noise
from export.verification.comparison import Comparison
from export.verification.judging import judge
from export.verification.metrics import Array, compare

NUDGES = 3
NUDGE_STEPS = 4
# Of a unit. Where the reference moves by more, nothing can be proved, and it is refused as before.
MOST = 0.05


def allow_own_noise(comparison: Comparison, budget: Budget) -> tuple[str, ...]:
    """Measure the reference's noise and allow for it in the comparison's yardsticks.

    Args:
        comparison: Its `yardsticks` are replaced where something moves.
        budget: The limits.

    Returns:
        What a certificate is to say of it, a line for each output that moves by enough to matter; empty where none does, or
        where the reference gives other answers to the very same samples.
    """
    try:
        again = judge(comparison.outputs, "float32", comparison.expected, comparison.asked_again(), budget)
        if any(verdict.violations for verdict in again.verdicts):
            return ()
        moved = [*comparison.at_another_level(), *(comparison.answers_to(batches) for batches in _nudged(comparison))]
    except ExportError:  # what it cannot answer says nothing about its numbers
        return ()
    limit = budget.max_scaled_error
    found: list[Yardstick] = []
    notes: list[str] = []
    for index, (output, yardstick) in enumerate(zip(comparison.outputs, comparison.yardsticks, strict=True)):
        noise = _noise(index, yardstick, comparison.expected, moved)
        allowed = with_noise(yardstick, noise, limit, MOST)
        matters = _units(allowed) != _units(yardstick)
        found.append(allowed if matters else yardstick)
        if matters:
            notes.append(
                f"output {output.name!r}: float32's own answers move by up to {max(noise):.3g} when its inputs change in their "
                f"last bits or its sums are taken in another order, so {NOISE_FACTOR:g} times that is allowed"
            )
    comparison.yardsticks = tuple(found)
    return tuple(notes)


def _nudged(comparison: Comparison) -> Iterator[Sequence[dict[str, Array]]]:
    """The user's batches, every float32 number a few steps away from itself."""
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
    index: int, yardstick: Yardstick, expected: Sequence[list[Value]], moved: Sequence[Sequence[list[Value]]]
) -> tuple[float, ...]:
    """The largest change of one output, in each kind of column."""
    largest = [0.0] * (len(yardstick.kinds) or 1)
    for answers in moved:
        for batch, other in zip(expected, answers, strict=True):
            one, two = batch[index], other[index]
            if not isinstance(one, np.ndarray) or not isinstance(two, np.ndarray) or one.shape != two.shape or not one.size:
                continue
            figures = compare(one, two, yardstick)
            errors = [kind.max_abs_error for kind in figures.kinds] or [figures.max_abs_error] * len(largest)
            largest = [max(a, b) if np.isfinite(b) else a for a, b in zip(largest, errors, strict=True)]
    return tuple(largest)


def _units(yardstick: Yardstick) -> Sequence[float]:
    return [kind.unit for kind in yardstick.kinds] or [yardstick.unit]
