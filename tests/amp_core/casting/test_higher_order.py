"""Policies reach what is inside of torch's operations that take functions: cond, while_loop, scan, flex_attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import scan, while_loop
from torch._ops import HigherOrderOperator
from torch.nn.attention.flex_attention import flex_attention

from amp_core import autocast

LOW, FULL = torch.bfloat16, torch.float32
X = torch.rand(4, 4)
policies = pytest.mark.parametrize(("policy", "exponential"), [(None, LOW), ("cuda", FULL), ("native+fp32:exp", FULL)])


@pytest.fixture(autouse=True)
def nothing_compiled_yet() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def branch(x: Tensor) -> Tensor:
    return x.mm(x).exp()


def by_cond(x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, branch, lambda x: -branch(x), (x,))


def by_while_loop(x: Tensor) -> Any:
    loop: Any = while_loop
    return loop(lambda count, _: count < 1, lambda count, _: (count + 1, branch(x)), (torch.tensor(0), branch(x)))[1]


def by_scan(x: Tensor) -> Any:
    return scan(lambda carry, row: (carry.clone(), branch(x) * torch.ones_like(row, dtype=LOW)), torch.zeros(4), x)[1][0]


@policies
@pytest.mark.parametrize("function", [by_cond, by_while_loop, by_scan])
@pytest.mark.parametrize("compiles", [False, True])
def test_a_policy_holds_in_the_functions(
    policy: str | None, exponential: torch.dtype, function: Callable[[Tensor], Any], compiles: bool
) -> None:
    called = torch.compile(function, backend="aot_eager", fullgraph=True) if compiles else function
    with torch.no_grad(), autocast("cpu", LOW, policy=policy):
        expected = branch(X)
        observed = called(X)
    assert observed.dtype is expected.dtype is exponential
    assert torch.equal(observed, expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own, while it looks at what the branches use
@policies
def test_gradients_of_a_branch_are_those_without_cond(policy: str | None, exponential: torch.dtype) -> None:
    gradients = []
    for function in (by_cond, branch):
        layer = nn.Linear(4, 4)
        nn.init.constant_(layer.weight, 0.1)
        nn.init.zeros_(layer.bias)
        with autocast("cpu", LOW, policy=policy):
            result = function(layer(X).float())
        assert result.dtype is exponential
        result.float().sum().backward()
        assert layer.weight.grad is not None
        gradients.append(layer.weight.grad)
    assert torch.equal(*gradients)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("compiles", [False, True])
def test_flex_attention_computes_in_the_dtype_of_the_region(compiles: bool) -> None:
    attend = torch.compile(flex_attention, backend="aot_eager") if compiles else flex_attention
    query = torch.rand(1, 2, 4, 16)
    results = []
    for policy in (None, "cuda"):
        with torch.no_grad(), autocast("cpu", LOW, policy=policy):
            results.append(attend(query, query, query))
    assert results[0].dtype is results[1].dtype is LOW
    assert torch.equal(results[0], results[1])


def test_an_operation_that_is_made_later_is_let_pass_too() -> None:
    with autocast("cpu", LOW, policy="cuda"):
        branch(X)  # by now the kernels are installed

    class Doubled(HigherOrderOperator):
        def __init__(self) -> None:
            super().__init__("halfserve_test_doubled")  # type: ignore[no-untyped-call]  # torch declares no types

        def __call__(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Any:
            return super().__call__(function, x)  # type: ignore[no-untyped-call]  # torch declares no types

    doubled = Doubled()
    key = torch._C.DispatchKey.AutogradCPU
    doubled.py_impl(key)(lambda function, x: 2 * function(x))
    with autocast("cpu", LOW, policy="cuda"):
        assert doubled(branch, X).dtype is FULL
