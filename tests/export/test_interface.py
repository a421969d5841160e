from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import export
from export.weight_ledger import FP16_MAX, FP16_OVERFLOW, Ledger, ledger_of


@pytest.mark.parametrize("name", export.__all__)
def test_every_public_name_is_there_and_is_no_module(name: str) -> None:
    found = getattr(export, name)
    assert callable(found)
    assert found.__name__ == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'export' has no attribute 'nope'"):
        _ = export.nope


def test_a_model_that_imports_the_helpers_does_not_load_onnx() -> None:
    program = (
        "import sys; from export import new_zeros, mask_value, inherit_dtype; "
        "print({name for name in sys.modules if name.startswith('onnx')})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"


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
    assert ledger_of(edges) == Ledger(overflow=1, flushed=1, subnormal=1)
    with np.errstate(over="ignore"):
        assert np.isinf(np.float16(FP16_OVERFLOW))
        assert np.float16(np.nextafter(FP16_OVERFLOW, 0)) == FP16_MAX


def test_ledgers_add_up() -> None:
    assert Ledger(overflow=1, flushed=2) + Ledger(flushed=3, subnormal=4) == Ledger(overflow=1, flushed=5, subnormal=4)
