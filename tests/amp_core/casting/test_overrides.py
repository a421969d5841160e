"""Policies in force: what they do to dtypes, and that nothing of them stays."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from amp_core import Policy, autocast


def registrations() -> set[str]:
    return set(torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU"))


def test_kernels_come_with_the_first_region_and_go_with_the_last() -> None:
    with autocast("cpu"):  # the repair of cat and stack, once per process
        before = registrations()
    with autocast("cpu", policy="cuda"):
        inside = registrations()
        with autocast("cpu", policy="native+low:cosh"):
            assert "aten::cosh" in registrations()
        assert registrations() == inside
    assert inside > before
    assert registrations() == before


def test_kernels_go_when_the_block_raises() -> None:
    with autocast("cpu"):
        before = registrations()
    with pytest.raises(ZeroDivisionError), autocast("cpu", policy="cuda"):
        raise ZeroDivisionError
    assert registrations() == before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_each_rule(dtype: torch.dtype) -> None:
    x = torch.ones(4, 4)
    policy = Policy().low("exp").fp32("matmul").widest("dot").ban("cosh")
    with autocast("cpu", dtype, policy=policy):
        assert x.exp().dtype is dtype
        assert (x.to(dtype) @ x.to(dtype)).dtype is torch.float32
        assert torch.dot(x[0].to(dtype), x[1]).dtype is torch.float32
        assert torch.dot(x[0].to(dtype), x[1].to(dtype)).dtype is dtype
        with pytest.raises(RuntimeError, match="cosh is unsafe to autocast and banned by this region's policy; leave it out"):
            x.cosh()
    assert x.cosh().dtype is torch.float32


def test_only_floating_tensors_of_the_device_are_cast() -> None:
    with autocast("cpu", torch.float16, policy=Policy().low("exp", "sum")):
        assert torch.ones(2, dtype=torch.float64).exp().dtype is torch.float64
        assert torch.ones(2, dtype=torch.complex64).exp().dtype is torch.complex64
        assert torch.ones(2, dtype=torch.int64).sum().dtype is torch.int64
        assert torch.ones(2).exp_().dtype is torch.float32
        assert torch.exp(torch.ones(2), out=torch.empty(2)).dtype is torch.float32


def test_an_explicit_dtype_is_the_callers_choice() -> None:
    x = torch.ones(4, dtype=torch.float16)
    with autocast("cpu", torch.float16, policy="cuda"):
        assert x.softmax(0).dtype is torch.float32
        assert x.softmax(0, torch.float16).dtype is torch.float16
        assert x.softmax(0, dtype=torch.float64).dtype is torch.float64
        assert x.sum(dtype=torch.float16).dtype is torch.float16


def test_backward_runs_in_the_dtypes_of_forward() -> None:
    x = torch.randn(4, 4, dtype=torch.float16, requires_grad=True)
    with autocast("cpu", torch.float16, policy="cuda"):
        y = x.softmax(0)
    assert y.dtype is torch.float32
    torch.autograd.backward(y.sum())
    assert x.grad is not None
    assert x.grad.dtype is torch.float16


def test_a_policy_reaches_operations_inside_composites() -> None:
    cell = nn.LSTMCell(4, 4)
    with autocast("cpu", torch.float16, policy="cuda"):
        hidden, state = cell(torch.ones(2, 4))
    assert hidden.dtype is state.dtype is torch.float16


def test_inner_regions_inherit_replace_and_switch_off() -> None:
    x = torch.ones(4, dtype=torch.float16)
    with autocast("cpu", torch.float16, policy="cuda"):
        with autocast("cpu", torch.bfloat16):
            assert x.softmax(0).dtype is torch.float32
        with autocast("cpu", policy="native"):
            assert x.softmax(0).dtype is torch.float16
        with autocast("cpu", enabled=False):
            assert x.softmax(0).dtype is torch.float16
        assert x.softmax(0).dtype is torch.float32


def test_another_threads_region_without_a_policy_keeps_torchs_rules() -> None:
    x, weight = torch.ones(4, 4), torch.ones(4, 4)

    def natively() -> list[torch.dtype]:
        with torch.autocast("cpu", torch.float16):
            einsum = torch.einsum("ij,jk->ik", x, weight)  # composite: its parts must still be cast
            return [einsum.dtype, x.half().softmax(0).dtype, (x @ weight).dtype, x.half().prod().dtype]

    expected = natively()
    with autocast("cpu", torch.float16, policy=Policy.cuda().low("prod").fp32("matmul")), ThreadPoolExecutor(1) as pool:
        assert pool.submit(natively).result() == expected
        assert (x @ weight).dtype is torch.float32


def test_threads_with_policies_of_their_own() -> None:
    ready = threading.Barrier(4, timeout=10)
    x = torch.ones(8, dtype=torch.float16)
    policies = {"native": torch.float16, "cuda": torch.float32}

    def run(policy: str) -> set[torch.dtype]:
        ready.wait()
        seen = set()
        for _ in range(25):
            with autocast("cpu", torch.float16, policy=policy):
                seen.add(x.softmax(0).dtype)
        return seen

    with ThreadPoolExecutor(4) as pool:
        results = [(policy, pool.submit(run, policy)) for policy in [*policies, *policies]]
    assert all(result.result() == {policies[policy]} for policy, result in results)
