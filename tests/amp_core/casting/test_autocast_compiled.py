"""Under torch.compile and torch.export: torch's own region without a policy, never a wrong dtype with one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from amp_core import Policy, autocast

if TYPE_CHECKING:
    from collections.abc import Iterator

HALF, FULL = torch.float16, torch.float32
X = torch.ones(2, 4)


@pytest.fixture(autouse=True)
def nothing_compiled_yet() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Any, *, fullgraph: bool) -> Any:
    return torch.compile(function, fullgraph=fullgraph, backend="aot_eager")


def product_and_softmax(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ x.T
    return y, y.softmax(-1)


def dtypes(results: Any) -> list[torch.dtype]:
    return [result.dtype for result in results]


@pytest.mark.parametrize("policy", [None, "native", Policy()])
def test_a_region_without_a_policy_compiles_in_one_graph(policy: Any) -> None:
    def block(x: Tensor) -> tuple[Tensor, Tensor]:
        with autocast("cpu", HALF, policy=policy):
            return product_and_softmax(x)

    assert dtypes(compiled(block, fullgraph=True)(X)) == dtypes(block(X)) == [HALF, HALF]


def test_a_decorated_function_compiles_in_one_graph() -> None:
    decorated = autocast("cpu", HALF)(product_and_softmax)
    assert dtypes(compiled(decorated, fullgraph=True)(X)) == [HALF, HALF]


def test_a_policy_inside_a_compiled_function_is_refused() -> None:
    def block(x: Tensor) -> tuple[Tensor, Tensor]:
        with autocast("cpu", HALF, policy="cuda"):
            return product_and_softmax(x)

    with pytest.raises(RuntimeError, match="torch.compile and torch.export cannot trace an autocast policy"):
        compiled(block, fullgraph=False)(X)
    assert dtypes(block(X)) == [HALF, FULL]


def test_a_compiled_function_inside_a_policy_never_answers_in_another_dtype() -> None:
    function = compiled(product_and_softmax, fullgraph=False)
    for _ in range(2):
        with autocast("cpu", HALF):
            assert dtypes(function(X)) == [HALF, HALF]
        with autocast("cpu", HALF, policy="cuda"):
            assert dtypes(function(X)) == [HALF, FULL]


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_program_keeps_the_region(strict: bool) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with autocast("cpu", HALF):
                return x @ x.T

    program = torch.export.export(Model(), (X,), strict=strict)
    assert program.module()(X).dtype is HALF


def test_exporting_a_policy_is_refused() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with autocast("cpu", HALF, policy="cuda"):
                return x @ x.T

    with pytest.raises(RuntimeError, match="torch.compile and torch.export cannot trace an autocast policy"):
        torch.export.export(Model(), (X,), strict=False)
