"""Policy.cuda() does on CPU tensors what the documentation says of CUDA ones: torch's own cases, 118 of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from amp_core.casting.autocast import autocast
from tests.amp_core.policy.cuda_lists import Case, cases

CASES = cases()


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    return type(value)(_cast(item, dtype) for item in value) if isinstance(value, (list, tuple)) else value


def _call(case: Case, args: tuple[Any, ...], *, as_method: bool) -> Any:
    function = getattr(torch.Tensor if as_method else case.namespace, case.op)
    return function(*args, **case.kwargs)


def _forms(case: Case) -> list[bool]:
    has_method = hasattr(torch.Tensor, case.op) and isinstance(case.args[0], torch.Tensor)
    return [
        as_method
        for as_method, there in ((False, case.namespace is not None and hasattr(case.namespace, case.op)), (True, has_method))
        if there
    ]


def _flat(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


# torch deprecates these two; they are in its lists all the same.
@pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated", "ignore:Using torch.cross without specifying the dim")
@pytest.mark.parametrize("case", CASES, ids=[f"{index}-{case.op}" for index, case in enumerate(CASES)])
def test_listed_operation_runs_in_the_listed_dtype(case: Case) -> None:
    forms = _forms(case)
    assert forms, f"torch has no {case.op}"
    for as_method in forms:
        with autocast("cpu", torch.float16, policy="cuda"):
            results = _flat(_call(case, case.args, as_method=as_method))
            with autocast("cpu", enabled=False):
                expected = _flat(_call(case, _cast(case.args, case.runs_in), as_method=as_method))
        for result, wanted in zip(results, expected, strict=True):
            if isinstance(result, torch.Tensor):
                assert result.dtype is case.returns
                torch.testing.assert_close(result, wanted, rtol=0, atol=0, equal_nan=True)
            else:
                assert result == wanted


def test_banned_operation_raises_and_names_the_safe_one() -> None:
    probabilities = torch.rand(8, 8)
    with (
        autocast("cpu", torch.float16, policy="cuda"),
        pytest.raises(RuntimeError, match="binary_cross_entropy is unsafe.*use binary_cross_entropy_with_logits"),
    ):
        torch.nn.functional.binary_cross_entropy(probabilities, probabilities)


def test_einsum_whose_case_in_torch_is_broken_runs_low() -> None:
    with autocast("cpu", torch.float16, policy="cuda"):
        assert torch.einsum("ij,jk->ik", torch.randn(2, 3), torch.randn(3, 4)).dtype is torch.float16


def test_every_case_that_a_cpu_can_run_is_here() -> None:
    # 121 cases, without two of cuDNN's own and the broken one; the banned operation has its own test above.
    assert len(CASES) == 117
