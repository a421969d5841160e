"""Ranges and counts, held against numpy's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amp_core.recorder.magnitudes import Magnitudes
from amp_core.recorder.running_magnitudes import DeviceMagnitudes, HostMagnitudes
from amp_core.recorder.tensor_parts import absolute_parts

KINDS = [HostMagnitudes, DeviceMagnitudes]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
EDGES = [
    0.0,
    -0.0,
    2.0**-24,
    2.0**-25,
    2.0**-14,
    -(2.0**-14),
    2.0**-15,
    65504.0,
    -65504.0,
    65536.0,
    math.inf,
    -math.inf,
    math.nan,
]
numbers = st.one_of(st.sampled_from(EDGES), st.floats(width=32), st.floats(-2.0, 2.0, width=32))
batches = st.lists(st.lists(numbers, min_size=1, max_size=20), max_size=4)


def expected(tensors: list[torch.Tensor]) -> Magnitudes:
    values = np.abs(np.concatenate([np.zeros(0), *(tensor.double().numpy() for tensor in tensors)]))
    finite = values[np.isfinite(values)]
    rest = finite[finite > 0]
    return Magnitudes(
        elements=len(values),
        non_finite=len(values) - len(finite),
        zeros=len(finite) - len(rest),
        overflow=int((rest > 65504).sum()),
        underflow=int((rest < 2.0**-24).sum()),
        subnormal=int(((rest >= 2.0**-24) & (rest < 2.0**-14)).sum()),
        largest=float(rest.max()) if len(rest) else None,
        smallest=float(rest.min()) if len(rest) else None,
    )


def measured(kind: Any, tensors: list[torch.Tensor]) -> Magnitudes:
    running = kind()
    for tensor in tensors:
        for part in absolute_parts(tensor):
            running.add(part)
    result = running.result()
    assert isinstance(result, Magnitudes)
    return result


@pytest.mark.parametrize("kind", KINDS)
@given(values=batches, dtype=st.sampled_from(DTYPES))
def test_they_are_what_numpy_finds(kind: Any, values: list[list[float]], dtype: torch.dtype) -> None:
    tensors = [torch.tensor(batch, dtype=dtype) for batch in values]
    assert measured(kind, tensors) == expected(tensors)


@given(first=batches, second=batches)
def test_the_magnitudes_of_two_groups_are_those_of_all(first: list[list[float]], second: list[list[float]]) -> None:
    one, two = ([torch.tensor(batch) for batch in values] for values in (first, second))
    assert Magnitudes.of_all([measured(HostMagnitudes, one), measured(HostMagnitudes, two)]) == expected(one + two)


def test_shares() -> None:
    magnitudes = Magnitudes(elements=8, non_finite=1, overflow=1, underflow=4)
    assert (magnitudes.lost_above, magnitudes.lost_below) == (0.25, 0.5)
    assert (Magnitudes().lost_above, Magnitudes().lost_below) == (0.0, 0.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")  # said by the call that turns it on, too
def test_a_device_is_not_waited_for() -> None:
    tensors = [torch.randn(64, 64, device="cuda", dtype=torch.float16) * 1e-5 for _ in range(3)]
    try:
        torch.cuda.set_sync_debug_mode("error")
        running = DeviceMagnitudes()
        for tensor in tensors:
            for part in absolute_parts(tensor):
                running.add(part)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert running.result() == expected([tensor.cpu().flatten() for tensor in tensors])
