"""Policy.cuda() does on every device what the documentation says of CUDA: torch's own cases."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from amp_core import autocast
from tests.amp_core.policy.torch_lists import Case, assert_same, cuda_cases

IDS = [f"{index}-{case.op}" for index, case in enumerate(cuda_cases("cpu", torch.float16))]
on_cuda = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_cuda)])
low_dtypes = pytest.mark.parametrize("low", [torch.float16, torch.bfloat16], ids=str)
# torch deprecates these two; they are in its lists all the same.
deprecated = pytest.mark.filterwarnings(
    "ignore:torch.chain_matmul is deprecated", "ignore:Using torch.cross without specifying the dim"
)


def check(case: Case, device: str, low: torch.dtype, policy: str | None) -> None:
    assert case.functions(), f"torch has no {case.op}"
    for function in case.functions():
        with autocast(device, low, policy=policy):
            results = function(*case.args, **case.kwargs)
        expected = function(*case.args_cast(), **case.kwargs)
        assert_same(results, expected)
        if isinstance(results, torch.Tensor):
            assert results.dtype is case.returns


@deprecated
@low_dtypes
@pytest.mark.parametrize("index", range(len(IDS)), ids=IDS)
def test_listed_operation_runs_in_the_listed_dtype(index: int, low: torch.dtype) -> None:
    check(cuda_cases("cpu", low)[index], "cpu", low, "cuda")


@deprecated
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@low_dtypes
@pytest.mark.parametrize("policy", [None, "cuda"])
def test_listed_operation_on_cuda(policy: str | None, low: torch.dtype, subtests: pytest.Subtests) -> None:
    for name, case in zip(IDS, cuda_cases("cuda", low), strict=True):
        with subtests.test(name):
            check(case, "cuda", low, policy)


@devices
@pytest.mark.parametrize("call", [torch.nn.functional.binary_cross_entropy, torch.nn.BCELoss()], ids=["function", "module"])
def test_banned_operation_raises_and_names_the_safe_one(call: Any, device: str) -> None:
    probabilities = torch.rand(8, 8, device=device)
    with autocast(device, torch.float16, policy="cuda"):
        with pytest.raises(RuntimeError, match="unsafe to autocast(.|\n)*binary_cross_entropy_with_logits"):
            call(probabilities, probabilities)
        with autocast(device, enabled=False):
            assert call(probabilities, probabilities).dtype is torch.float32


@devices
def test_einsum_whose_case_in_torch_is_broken_runs_low(device: str) -> None:
    a, b = torch.randn(2, 3, device=device), torch.randn(3, 4, device=device)
    with autocast(device, torch.float16, policy="cuda"):
        assert torch.einsum("ij,jk->ik", a, b).dtype is torch.float16


def test_every_case_that_a_cpu_can_run_is_here() -> None:
    # 121 cases (120 in torch 2.11, which has no rms_norm there), without two of cuDNN's own and the broken one; the banned
    # operation has its own test above.
    assert len(IDS) in {116, 117}
