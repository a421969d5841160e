"""Regions together with torch's own machinery: replicas, DDP, checkpointing, torch.func, forward mode, tracing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel, replicate

from halfserve import Policy, autocast

HALF, FULL = torch.float16, torch.float32
X, WEIGHT = torch.rand(4, 4), torch.rand(4, 4)
policies = pytest.mark.parametrize(
    ("policy", "product", "exponential"),
    # The dtypes of a product of float32 tensors and of the exponential of a float16 one.
    [
        (None, HALF, HALF),
        ("native", HALF, HALF),
        ("cuda", HALF, FULL),
        (Policy().fp32("matmul", "mm", "mv").low("exp"), FULL, HALF),
    ],
    ids=str,
)


def multiply(x: Tensor) -> Tensor:
    return x @ WEIGHT


def total(x: Tensor) -> Tensor:
    return (x @ WEIGHT).tanh().float().sum()


class Block(nn.Module):
    """Its own region, so that replicas in other threads are in it too."""

    def __init__(self, policy: Any = None) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.policy = policy

    def forward(self, x: Tensor) -> Tensor:
        with autocast("cpu", HALF, policy=self.policy):
            y: Tensor = self.layer(x).softmax(-1)
        return y


@pytest.mark.parametrize(("policy", "dtype"), [(None, HALF), ("cuda", FULL)])
def test_replicas_in_threads_as_data_parallel_runs_them(policy: Any, dtype: torch.dtype) -> None:
    module, start = Block(policy), threading.Barrier(4, timeout=60)
    alone = module(X)

    def run(_: int) -> Tensor:
        start.wait()
        y: Tensor = module(X)
        torch.autograd.backward(y.float().sum())
        return y

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(run, range(4)))
    assert all(result.dtype is dtype and torch.equal(result, alone) for result in results)
    assert module.layer.weight.grad is not None


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_replicas_of_a_decorated_forward_on_two_devices() -> None:
    class OnCuda(nn.Linear):
        @autocast("cuda", HALF)
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    replicas = replicate(OnCuda(4, 4).cuda(), [0, 1])
    outputs = nn.parallel.parallel_apply(replicas, [X.to(0), X.to(1)])
    assert [output.dtype for output in outputs] == [HALF, HALF]


@pytest.fixture
def one_process_group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("policy", "dtype"), [(None, HALF), ("cuda", FULL)])
def test_distributed_data_parallel(one_process_group: None, policy: Any, dtype: torch.dtype) -> None:
    plain = Block(policy)
    parallel = DistributedDataParallel(plain)
    for _ in range(2):
        parallel.zero_grad()
        with autocast("cpu", HALF, policy=policy):
            y = parallel(X)
        assert y.dtype is dtype
        y.float().square().sum().backward()
        found = plain.layer.weight.grad
        assert found is not None
        expected = torch.autograd.grad(plain(X).float().square().sum(), plain.layer.weight)[0]
        assert torch.equal(found, expected)


@policies
def test_vmap(policy: Any, product: torch.dtype, exponential: torch.dtype) -> None:
    with autocast("cpu", HALF, policy=policy):
        around = torch.func.vmap(multiply)(X), torch.func.vmap(torch.exp)(X.half())
        plain = multiply(X), torch.exp(X.half())
    inside = torch.func.vmap(autocast("cpu", HALF, policy=policy)(multiply))(X)
    assert [tensor.dtype for tensor in (*around, inside)] == [product, exponential, product]
    for batched, alone in zip((*around, inside), (*plain, plain[0]), strict=True):
        torch.testing.assert_close(batched, alone, rtol=2e-3, atol=0)


@policies
def test_grad_and_jacobians(policy: Any, product: torch.dtype, exponential: torch.dtype) -> None:
    del product, exponential
    region = autocast("cpu", HALF, policy=policy)
    leaf = X.clone().requires_grad_()
    with region:
        loss = total(leaf)
        around = torch.func.grad(total)(X)
        per_row = torch.func.vmap(torch.func.grad(total))(X)
        jacobian = torch.func.jacrev(multiply)(X)
    inside = torch.func.grad(region(total))(X)
    (expected,) = torch.autograd.grad(loss, leaf)
    for found in (around, per_row, inside):
        assert found.dtype is FULL
        torch.testing.assert_close(found, expected, rtol=5e-3, atol=5e-3)
    assert jacobian.shape == (4, 4, 4, 4)


@pytest.mark.filterwarnings("ignore:.torch.jit")  # torch's own, in its rules of forward mode
@policies
def test_forward_mode(policy: Any, product: torch.dtype, exponential: torch.dtype) -> None:
    with autocast("cpu", HALF, policy=policy):
        for function, x, dtype in ((multiply, X, product), (torch.exp, X.half(), exponential)):
            value, tangent, *_ = torch.func.jvp(function, (x,), (torch.ones_like(x),))
            assert value.dtype is tangent.dtype is dtype
            assert torch.equal(value, function(x))


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.xfail(raises=(AssertionError, RuntimeError), reason="functorch shows the parts of a composite to autocast again")
@pytest.mark.parametrize("transform", ["jvp", "grad"])
def test_a_rule_for_a_composite_holds_though_torch_has_another_for_its_parts(transform: str) -> None:
    region = autocast("cpu", HALF, policy=Policy().fp32("matmul"))
    if transform == "jvp":
        assert torch.func.jvp(region(multiply), (X,), (X,))[0].dtype is FULL
    else:
        assert torch.func.grad(region(total))(X).dtype is FULL


@policies
def test_functional_call_and_functionalize(policy: Any, product: torch.dtype, exponential: torch.dtype) -> None:
    del product
    layer = nn.Linear(4, 4, bias=False)
    with autocast("cpu", HALF, policy=policy):
        called = torch.func.functional_call(layer, {"weight": WEIGHT}, (X,))
        functional = torch.func.functionalize(torch.exp)(X.half())
    assert [called.dtype, functional.dtype] == [HALF, exponential]  # linear is torch's own low operation in all four


@pytest.mark.filterwarnings("ignore:.torch.jit", "ignore:Converting a tensor")
@policies
def test_a_trace_has_the_casts_in_it(policy: Any, product: torch.dtype, exponential: torch.dtype) -> None:
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ WEIGHT, x.half().exp()

    with autocast("cpu", HALF, cache_enabled=False, policy=policy):  # torch's own advice: a cached cast is not in the trace
        traced = torch.jit.trace(both, (X,), check_trace=False)  # type: ignore[no-untyped-call]  # torch's own
        expected = both(X)
    for found, wanted, dtype in zip(traced(X), expected, (product, exponential), strict=True):
        assert found.dtype is dtype
        assert torch.equal(found, wanted)


def test_a_default_device_and_inference_mode_change_nothing() -> None:
    with torch.device("meta"), autocast("cpu", HALF, policy="cuda"):
        assert torch.ones(2, 2).mm(torch.ones(2, 2)).dtype is FULL  # on meta
        assert X.mm(WEIGHT).dtype is HALF
    layer = nn.Linear(4, 4)
    with autocast("cpu", HALF):
        with torch.inference_mode():
            layer(X)
        with torch.no_grad():
            layer(X)
        y = layer(X)  # its cached weight, if any, must still lead to the weight
    y.float().sum().backward()
    assert layer.weight.grad is not None
