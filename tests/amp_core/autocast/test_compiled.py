"""Regions inside and around torch.compile, torch.export and higher-order operations."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import scan, while_loop
from torch._ops import HigherOrderOperator
from torch.nn.attention.flex_attention import flex_attention

from halfserve import Policy, autocast
from halfserve.amp_core.autocast.policy_state import NO_POLICIES, policies_in_force

HALF, FULL = torch.float16, torch.float32
X = torch.ones(2, 4)


@pytest.fixture(autouse=True)
def nothing_compiled_yet() -> Iterator[None]:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.reset()


def compiled(function: Any, *, fullgraph: bool) -> Any:
    return torch.compile(function, fullgraph=fullgraph, backend="aot_eager")


def product_and_softmax(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ x.T
    return y, y.softmax(-1)


def dtypes(results: Any) -> list[torch.dtype]:
    return [result.dtype for result in results]


def batched_product(x: Tensor) -> tuple[Tensor]:
    return (torch.einsum("ij,jk->ik", x, x.T),)


@pytest.mark.parametrize(
    ("policy", "function", "expected"),
    [
        *((policy, product_and_softmax, [HALF, HALF]) for policy in (None, "native", Policy())),
        (Policy.cuda().fp32("matmul", "mm"), product_and_softmax, [FULL, FULL]),
        ("native+fp32:bmm", batched_product, [FULL]),  # a part of a composite operation
    ],
)
def test_a_region_compiles_in_one_graph(
    policy: Any, function: Callable[[Tensor], tuple[Tensor, ...]], expected: list[torch.dtype]
) -> None:
    def block(x: Tensor) -> tuple[Tensor, ...]:
        with autocast("cpu", HALF, policy=policy):
            return function(x)

    assert dtypes(compiled(block, fullgraph=True)(X)) == dtypes(block(X)) == expected


@pytest.mark.parametrize(("policy", "softmax"), [(None, HALF), ("cuda", FULL)])
def test_a_decorated_function_compiles_in_one_graph(policy: str | None, softmax: torch.dtype) -> None:
    decorated = autocast("cpu", HALF, policy=policy)(product_and_softmax)
    assert dtypes(compiled(decorated, fullgraph=True)(X)) == [HALF, softmax]


def test_more_policies_than_there_are_dtypes_are_told_apart() -> None:
    """A policy's number has two digits; two that differ in the second alone must not share what was compiled."""
    others = ("mm", "exp", "log", "sum", "softmax", "cumsum", "prod")
    lists = [ops for size in range(1, 4) for ops in itertools.combinations(others, size)]
    found: dict[tuple[Any, bool], Policy] = {}
    for ops in [*lists, *(("matmul", *ops) for ops in lists)]:
        number = NO_POLICIES.with_policy("cpu", Policy().fp32(*ops)).number
        if number is not None:  # torch has the same rules
            found[number[0], "matmul" in ops] = Policy().fp32(*ops)
    first = next(digit for digit, with_matmul in found if with_matmul and (digit, False) in found)
    function = compiled(lambda x: x @ x.T, fullgraph=True)
    for with_matmul, dtype in ((True, FULL), (False, HALF), (True, FULL)):
        with autocast("cpu", HALF, policy=found[first, with_matmul]):
            assert function(X).dtype is dtype


def policy_block(x: Tensor) -> tuple[Tensor, ...]:
    with autocast("cpu", HALF, policy="cuda"):
        outer = product_and_softmax(x)
        with autocast("cpu", HALF, policy="native"):
            inner = product_and_softmax(x)
        with autocast("cpu", HALF):
            inherited = product_and_softmax(x)
    return (*outer, *inner, *inherited)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_policy_inside_a_compiled_function_is_one_graph(backend: str) -> None:
    function = torch.compile(policy_block, fullgraph=True, backend=backend)
    assert dtypes(function(X)) == dtypes(policy_block(X)) == [HALF, FULL, HALF, HALF, HALF, FULL]
    assert policies_in_force() is NO_POLICIES


@pytest.mark.parametrize("policy", [None, "cuda"])
def test_an_instance_made_outside_breaks_the_graph_and_nothing_else(policy: str | None) -> None:
    region = autocast("cpu", HALF, policy=policy)

    def block(x: Tensor) -> tuple[Tensor, Tensor]:
        with region:
            return product_and_softmax(x)

    assert dtypes(compiled(block, fullgraph=False)(X)) == dtypes(block(X)) == [HALF, FULL if policy else HALF]
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Unsupported context manager"):
        compiled(block, fullgraph=True)(X)


def test_values_and_gradients_of_a_compiled_policy_equal_the_eager_ones() -> None:
    x, weight = torch.randn(8, 16), torch.randn(16, 16)

    def loss(weight: Tensor) -> Tensor:
        with autocast("cpu", HALF, policy="cuda"):
            return (x @ weight).softmax(-1).log().sum()

    gradients = []
    for function in (loss, compiled(loss, fullgraph=True)):
        leaf = weight.clone().requires_grad_()
        value = function(leaf)
        value.backward()
        gradients.append((value.detach(), leaf.grad))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


@pytest.mark.parametrize("order", [*itertools.permutations(["native", "cuda", "native+fp32:softmax,matmul"])])
def test_a_compiled_function_answers_in_the_policy_that_is_in_force_when_it_is_called(order: tuple[str, ...]) -> None:
    function = compiled(product_and_softmax, fullgraph=True)
    for policy in (*order, *order):
        with autocast("cpu", HALF, policy=policy):
            assert dtypes(function(X)) == dtypes(product_and_softmax(X)), policy
    assert dtypes(function(X)) == [FULL, FULL]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4, "compiled once for each"


def test_a_region_around_a_graph_break() -> None:
    def block(x: Tensor) -> list[Tensor]:
        before = x.softmax(-1)
        with autocast("cpu", HALF, policy="cuda"):
            first = x.softmax(-1)
            torch._dynamo.graph_break()
            second = x.softmax(-1)
        return [before, first, second, x.softmax(-1)]

    x = X.half()
    assert dtypes(compiled(block, fullgraph=False)(x)) == [HALF, FULL, FULL, HALF]
    assert policies_in_force() is NO_POLICIES


def test_a_trace_that_fails_in_the_middle_of_a_region_leaves_no_policy_behind() -> None:
    def block(x: Tensor) -> Tensor:
        with autocast("cpu", HALF, policy="native+ban:cosh"):
            return x.cosh()

    with pytest.raises(RuntimeError, match="cosh is unsafe to autocast and banned"):
        compiled(block, fullgraph=True)(X)
    assert policies_in_force() is NO_POLICIES
    assert not torch.is_autocast_enabled("cpu")


CHILDREN = """
import os, sys, torch, torch._inductor.compile_fx
from halfserve import autocast

function = torch.compile(lambda x: (x.softmax(-1), x.exp()))
for policy in sys.argv[1:]:
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        continue
    with autocast("cpu", torch.float16, policy=policy):
        results = function(torch.ones(2, 4, dtype=torch.float16))
    counts = torch._dynamo.utils.counters["aot_autograd"]
    print(*(result.dtype for result in results), counts["autograd_cache_hit"], counts["autograd_cache_miss"], flush=True)
    os._exit(0)
"""


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler, which torch's own compiler calls on the CPU")
@pytest.mark.timeout(1200)
def test_the_cache_on_disk_never_hands_one_policys_code_to_another(tmp_path: Path) -> None:
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path.cwd())}
    environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    # Each policy is its process's first, so all have the same number there; torch is imported once for all of them.
    policies = ["native+fp32:softmax", "native+fp32:exp", "native+fp32:softmax"]
    command = [sys.executable, "-c", CHILDREN, *policies]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "torch.float32 torch.float16 0 1",
        "torch.float16 torch.float32 0 1",
        "torch.float32 torch.float16 1 0",
    ]


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_program_keeps_the_region(strict: bool) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with autocast("cpu", HALF):
                return x @ x.T

    program = torch.export.export(Model(), (X,), strict=strict)
    assert program.module()(X).dtype is HALF


@pytest.mark.parametrize("strict", [True, False])
def test_exporting_a_policy_is_refused(strict: bool) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with autocast("cpu", HALF, policy="cuda"):
                return x @ x.T

    with pytest.raises(RuntimeError, match="torch.export cannot write down an autocast policy"):
        torch.export.export(Model(), (X,), strict=strict)


def test_exporting_inside_of_a_policys_region_is_refused() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.softmax(-1)

    with autocast("cpu", HALF, policy="cuda"), pytest.raises(RuntimeError, match="torch.export cannot write down"):
        torch.export.export(Model(), (X,), strict=False)


FULLGRAPH = "torch.compile(promote, backend='aot_eager', fullgraph=True)"


@pytest.mark.long
@pytest.mark.parametrize(
    ("run", "policy"),
    [(FULLGRAPH, "None"), (FULLGRAPH, "'cuda'"), ("export(promote)", "None")],
)
def test_the_first_region_of_a_process_may_be_in_a_traced_function(run: str, policy: str) -> None:
    """What torch's autocast lacks is repaired for it, too: in a process that has entered no region yet."""
    program = f"""
import torch
from halfserve import autocast
def promote(a, b):
    with autocast("cpu", torch.bfloat16, policy={policy}):
        return torch.cat([a, b])
class Promoting(torch.nn.Module):
    def forward(self, a, b):
        return promote(a, b)
halves = torch.ones(2, dtype=torch.float16), torch.ones(2, dtype=torch.bfloat16)
export = lambda _: torch.export.export(Promoting(), halves).module()
print(({run})(*halves).dtype)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=500)
    assert done.stdout == "torch.float32\n", done.stderr


LOW = torch.bfloat16
SQUARE = torch.rand(4, 4)
policies = pytest.mark.parametrize(("policy", "exponential"), [(None, LOW), ("cuda", FULL), ("native+fp32:exp", FULL)])


def branch(x: Tensor) -> Tensor:
    return x.mm(x).exp()


def by_cond(x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, branch, lambda x: -branch(x), (x,))


def by_while_loop(x: Tensor) -> Any:
    loop: Any = while_loop
    return loop(lambda count, _: count < 1, lambda count, _: (count + 1, branch(x)), (torch.tensor(0), branch(x)))[1]


def by_scan(x: Tensor) -> Any:
    return scan(lambda carry, row: (carry.clone(), branch(x) * torch.ones_like(row, dtype=LOW)), torch.zeros(4), x)[1][0]


@pytest.mark.long
@policies
@pytest.mark.parametrize("function", [by_cond, by_while_loop, by_scan])
@pytest.mark.parametrize("compiles", [False, True])
def test_a_policy_holds_in_the_functions(
    policy: str | None, exponential: torch.dtype, function: Callable[[Tensor], Any], compiles: bool
) -> None:
    called = torch.compile(function, backend="aot_eager", fullgraph=True) if compiles else function
    with torch.no_grad(), autocast("cpu", LOW, policy=policy):
        expected = branch(SQUARE)
        observed = called(SQUARE)
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
            result = function(layer(SQUARE).float())
        assert result.dtype is exponential
        result.float().sum().backward()
        assert layer.weight.grad is not None
        gradients.append(layer.weight.grad)
    assert torch.equal(*gradients)


@pytest.mark.long
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
        branch(SQUARE)  # by now the kernels are installed

    class Doubled(HigherOrderOperator):
        def __init__(self) -> None:
            super().__init__("halfserve_test_doubled")  # type: ignore[no-untyped-call]  # torch declares no types

        def __call__(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Any:
            return super().__call__(function, x)  # type: ignore[no-untyped-call]  # torch declares no types

    doubled = Doubled()
    key = torch._C.DispatchKey.AutogradCPU
    doubled.py_impl(key)(lambda function, x: 2 * function(x))
    with autocast("cpu", LOW, policy="cuda"):
        assert doubled(branch, SQUARE).dtype is FULL
