"""All pairs by name."""

from __future__ import annotations

from tests.export.dtype_check.pairs import dtypes, factories, held, values
from tests.export.dtype_check.pairs.projected import Case

CASES: dict[str, Case] = {
    **factories.FACTORIES,
    **factories.FUNCTIONS,
    **factories.ARRAYS,
    **dtypes.CASES,
    **values.MASKS,
    **values.EPSILONS,
    **values.POSITIONS,
    **values.MAGNITUDES,
    **held.CASES,
}
