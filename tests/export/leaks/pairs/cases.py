"""All pairs by name."""

from __future__ import annotations

from tests.export.leaks.pairs import arrays, dtypes, epsilons, factories, functions, held, magnitudes, masks, positions
from tests.export.leaks.pairs.projected import Case

CASES: dict[str, Case] = {
    **factories.CASES,
    **dtypes.CASES,
    **masks.CASES,
    **epsilons.CASES,
    **positions.CASES,
    **magnitudes.CASES,
    **held.CASES,
    **arrays.CASES,
    **functions.CASES,
}
