"""torch's own cases for the CPU lists: without a policy, the same dtype and value as torch.autocast, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from amp_core import autocast
from tests.amp_core.policy.torch_lists import assert_same, cpu_cases

IDS = [f"{index}-{case.op}" for index, case in enumerate(cpu_cases(torch.bfloat16))]


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("index", range(len(IDS)), ids=IDS)
@pytest.mark.parametrize("policy", [None, "native"])
def test_listed_operation_is_as_in_torch(index: int, low: torch.dtype, policy: str | None) -> None:
    case = cpu_cases(low)[index]
    assert case.functions(), f"torch has no {case.op}"
    for function in case.functions():
        with torch.autocast("cpu", low):
            expected: Any = function(*case.args, **case.kwargs)
        with autocast("cpu", low, policy=policy):
            results = function(*case.args, **case.kwargs)
        assert_same(results, expected)
        if isinstance(results, torch.Tensor):
            assert results.dtype is case.returns
            assert_same(results, function(*case.args_cast(), **case.kwargs))


def test_every_case_is_here() -> None:
    # 9 functions and 8 methods that promote by themselves, 17 low, 19 float32, 2 widest.
    assert len(IDS) == 55
