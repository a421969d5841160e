from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from halfserve.export.half_types import FP16_MAX, FP16_OVERFLOW, WeightLedger, ledger_of

finite = hnp.arrays(np.float32, st.integers(0, 30), elements=st.floats(-(2.0**20), 2.0**20, width=32))


@given(finite)
def test_it_counts_what_rounding_does(values: np.ndarray[Any, Any]) -> None:
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float16)
    counted = ledger_of(values)
    assert counted.flushed == np.count_nonzero((values != 0) & (rounded == 0))
    assert counted.subnormal == np.count_nonzero((rounded != 0) & (np.abs(values) < 2.0**-14))
    assert counted.overflow == np.count_nonzero(np.abs(values) > FP16_MAX) >= np.count_nonzero(np.isinf(rounded))


def test_the_edges() -> None:
    edges = np.array([0, 2.0**-25, np.nextafter(2.0**-25, 1), 2.0**-14, 65504, 65505, np.inf, np.nan])
    assert ledger_of(edges) == WeightLedger(overflow=1, flushed=1, subnormal=1)
    with np.errstate(over="ignore"):
        assert np.isinf(np.float16(FP16_OVERFLOW))
        assert np.float16(np.nextafter(FP16_OVERFLOW, 0)) == FP16_MAX


def test_ledgers_add_up() -> None:
    assert WeightLedger(overflow=1, flushed=2) + WeightLedger(flushed=3, subnormal=4) == WeightLedger(
        overflow=1, flushed=5, subnormal=4
    )
