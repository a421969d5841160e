"""Activation checkpointing computes again what it computed before, in the same dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from amp_core import autocast
from amp_core.casting.policy_state import NO_POLICIES, policies_in_force

HALF = torch.float16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x).softmax(-1)
        self.seen.append(y.dtype)
        return y * 2


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("policy", [None, "cuda", "native+fp32:softmax,linear"])
@pytest.mark.parametrize("backward_inside", [True, False])
def test_gradients_equal_those_without_checkpointing(use_reentrant: bool, policy: Any, backward_inside: bool) -> None:
    gradients, tag = [], torch.compiler.config.cache_key_tag
    for checkpointed in (False, True):
        torch.manual_seed(0)
        block, x = Block(), torch.randn(3, 4, requires_grad=True)
        with autocast("cpu", HALF, policy=policy):
            y = checkpoint(block, x, use_reentrant=use_reentrant) if checkpointed else block(x)
            if backward_inside:
                y.float().pow(2).sum().backward()
        if not backward_inside:
            y.float().pow(2).sum().backward()
        assert set(block.seen) == {torch.float32 if policy else HALF}
        assert policies_in_force() is NO_POLICIES
        assert torch.compiler.config.cache_key_tag == tag
        gradients.append((x.grad, block.linear.weight.grad))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


def test_another_policy_around_backward_does_not_leak_into_the_recomputation() -> None:
    block, x = Block(), torch.randn(3, 4, requires_grad=True)
    with autocast("cpu", HALF, policy="cuda"):
        y = checkpoint_sequential([block, Block()], 1, x, use_reentrant=True)  # type: ignore[no-untyped-call]
    with autocast("cpu", HALF, policy="native+fp32:linear"):
        y.sum().backward()
        assert str(policies_in_force().of("cpu")) == "native+fp32:linear"
    assert set(block.seen) == {torch.float32}


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("region", [autocast, torch.autocast])
def test_a_policy_around_backward_does_not_leak_where_forward_had_none(region: Any, use_reentrant: bool) -> None:
    with autocast("cpu", HALF, policy="cuda"):
        pass
    block, x = Block(), torch.randn(3, 4, requires_grad=True)
    with region("cpu", HALF):
        y = checkpoint(block, x, use_reentrant=use_reentrant)
    with autocast("cpu", HALF, policy="cuda"):
        y.float().sum().backward()
        assert str(policies_in_force().of("cpu")) == "cuda"
    assert set(block.seen) == {HALF}


def test_a_function_that_raises_when_it_is_computed_again_leaves_no_policy_behind() -> None:
    calls: list[int] = []

    def once(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 1:
            raise ZeroDivisionError
        return x.exp()

    x = torch.ones(2, requires_grad=True)
    with autocast("cpu", HALF, policy="cuda"):
        y = checkpoint(once, x, use_reentrant=True)
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()
    assert policies_in_force() is NO_POLICIES
