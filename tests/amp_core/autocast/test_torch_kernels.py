"""Defects of torch.autocast that ours does not have."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from halfserve import autocast
from tests.amp_core.autocast.conftest import product

# Each test runs with both classes; torch's must fail it, which `xfail_strict` holds us to.

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
LOW = (HALF, BRAIN)
has_defect = pytest.mark.xfail(raises=(AssertionError, RuntimeError), reason="torch.autocast has this defect")
both = pytest.mark.parametrize("region", [autocast, pytest.param(torch.autocast, marks=has_defect)], ids=["ours", "torch's"])


@both
def test_defect_1_one_instance_entered_twice(region: Any) -> None:
    instance = region("cpu", HALF)
    with instance:
        with instance:
            assert product() is HALF
        assert product() is HALF
    assert product() is FULL


@both
def test_defect_1_decorated_recursion(region: Any) -> None:
    @region("cpu", HALF)  # type: ignore[untyped-decorator]  # torch's or ours
    def recurse(depth: int) -> list[torch.dtype]:
        return [product()] + (recurse(depth - 1) if depth else [])

    assert recurse(3) == [HALF] * 4
    assert product() is FULL


@both
def test_defect_2_one_decorated_function_in_two_threads(region: Any) -> None:
    both_inside = threading.Barrier(2, timeout=60)

    @region("cpu", HALF)  # type: ignore[untyped-decorator]  # torch's or ours
    def inside() -> torch.dtype:
        both_inside.wait()
        return product()

    def with_own_state() -> tuple[torch.dtype, torch.dtype]:
        with autocast("cpu", BRAIN):
            return inside(), product()

    def without() -> tuple[torch.dtype, torch.dtype]:
        return inside(), product()

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(with_own_state), pool.submit(without)
        assert first.result() == (HALF, BRAIN)
        assert second.result() == (HALF, FULL)


@both
def test_defect_3_decorated_generator_runs_in_the_region_and_its_consumer_does_not(region: Any) -> None:
    @region("cpu", HALF)  # type: ignore[untyped-decorator]  # torch's or ours
    def generate() -> Iterator[torch.dtype]:
        yield product()
        yield product()

    assert [(dtype, product()) for dtype in generate()] == [(HALF, FULL)] * 2


@both
@pytest.mark.parametrize(("outer", "inner"), [LOW, LOW[::-1]])
def test_defect_4_nested_region_of_another_dtype_casts_the_weight_again(
    region: Any, outer: torch.dtype, inner: torch.dtype
) -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    with region("cpu", outer):
        assert layer(x).dtype is outer
        with region("cpu", inner):
            assert layer(x).dtype is inner
        assert layer(x).dtype is outer


def test_defect_4_with_a_region_of_torchs_in_between() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    with autocast("cpu", HALF):
        assert layer(x).dtype is HALF
        with torch.autocast("cpu", BRAIN, cache_enabled=False), autocast("cpu", BRAIN, cache_enabled=True):
            assert layer(x).dtype is BRAIN
        assert layer(x).dtype is HALF


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("fused", [False, True])
def test_defect_5_weight_changed_by_an_optimizer_is_cast_again(kind: Any, fused: bool) -> None:
    layer = nn.Linear(4, 4, bias=False)
    optimizer = kind(layer.parameters(), lr=1.0, fused=fused)
    x = torch.ones(2, 4)
    with autocast("cpu", BRAIN):
        layer(x).sum().backward()
        layer(x)  # backward copies gradients, and with that has emptied the cache
        optimizer.step()
        after = layer(x)
    expected = x.bfloat16() @ layer.weight.detach().bfloat16().T
    torch.testing.assert_close(after.detach(), expected, rtol=0, atol=0)


@pytest.mark.long
def test_defect_5_is_torchs_in_a_process_without_ours() -> None:
    # Regions of ours make the process watch optimizers and copies, which serves torch's regions too.
    program = """
import torch
x = torch.ones(2, 4)
for fused in (False, True):
    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1.0, fused=fused)
    with torch.autocast("cpu", torch.bfloat16):
        before = layer(x)
        before.sum().backward()
        optimizer.step()
        print(torch.equal(layer(x), before))
with torch.autocast("cpu", torch.bfloat16):
    before = layer(x)
    layer.load_state_dict(torch.nn.Linear(4, 4).state_dict())
    print(torch.equal(layer(x), before))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=500)
    assert run.stdout.split() == ["True"] * 3


@both
def test_defect_6_another_thread_leaving_its_region_leaves_this_ones_cache_alone(region: Any) -> None:
    layer, x = nn.Linear(4, 4, bias=False), torch.ones(2, 4)

    def enter_and_leave() -> None:
        with region("cpu", BRAIN):
            layer(x)

    with region("cpu", BRAIN):
        before = layer(x)
        # The only sign of a cached copy: a write that nobody can see does not show until the cache is emptied.
        layer.weight.untyped_storage().fill_(0)  # type: ignore[attr-defined]  # not in torch's stubs
        with ThreadPoolExecutor(1) as pool:
            pool.submit(enter_and_leave).result()
        assert torch.equal(layer(x), before)
        torch.clear_autocast_cache()
        assert torch.equal(layer(x), torch.zeros_like(before))


@both
def test_defect_6_threads_of_different_dtypes_never_share_a_cached_weight(region: Any) -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)

    def run() -> torch.dtype:
        with region("cpu", BRAIN):
            dtype: torch.dtype = layer(x).dtype
            return dtype

    with region("cpu", HALF), ThreadPoolExecutor(1) as pool:
        assert layer(x).dtype is HALF
        assert pool.submit(run).result() is BRAIN
        assert layer(x).dtype is HALF


@pytest.mark.long
def test_defect_7_is_torchs_until_a_region_of_ours_has_been_entered() -> None:
    # In a process of its own, since the repair is one for the whole process and serves torch's regions too.
    program = """
import torch
def promote():
    for function, low in ((torch.cat, torch.float16), (torch.stack, torch.bfloat16)):
        with torch.autocast("cpu", low):
            try:
                print(function([torch.ones(3, dtype=torch.float16), torch.ones(3, dtype=torch.bfloat16)]).dtype)
            except RuntimeError as error:
                print(str(error).splitlines()[0])
promote()
from halfserve import autocast
with autocast("cpu"):
    promote()
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=500)
    *defects, cat, stack = run.stdout.splitlines()
    assert len(defects) == 2
    assert all("Unexpected floating ScalarType" in defect for defect in defects)
    assert (cat, stack) == ("torch.float32", "torch.float32")


@pytest.mark.parametrize("policy", [None, "cuda"])
@pytest.mark.parametrize("region", LOW)
def test_defect_7_with_and_without_a_policy(policy: str | None, region: torch.dtype) -> None:
    halves, others = torch.ones(3, dtype=HALF), torch.ones(3, dtype=BRAIN)
    with autocast("cpu", region, policy=policy):
        for other in LOW:
            assert torch.cat([torch.ones(3, dtype=other)] * 2).dtype is other
        assert torch.cat([halves, others]).dtype is FULL
        assert torch.stack([halves, others, torch.ones(3)]).dtype is FULL
        assert torch.cat([halves.double(), halves]).dtype is torch.float64


def test_defect_7_operations_that_do_not_promote_by_themselves() -> None:
    halves, others = torch.ones(3, dtype=HALF), torch.ones(3, dtype=BRAIN)
    with autocast("cpu", BRAIN, policy="cuda"):
        assert torch.dot(halves, others).dtype is FULL
        assert torch.dot(halves, halves).dtype is HALF


@pytest.fixture
def cuda_rules() -> Iterator[None]:
    """torch's autocast for CUDA, switched on as in a region that ours has prepared; that needs no device."""
    with autocast("cuda", BRAIN, enabled=False):
        torch.set_autocast_enabled("cuda", True)
        yield


def ones(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.ones(shape, dtype=dtype, device="cuda")


# Without grid_sampler, which torch finds the shape of by indexing: that needs a device (policy/test_cuda_lists.py).
PROMOTED: dict[str, Callable[[torch.dtype, torch.dtype], Tensor]] = {
    "addcdiv": lambda x, y: torch.addcdiv(ones(x, 3), ones(x, 3), ones(y, 3)),
    "addcmul": lambda x, y: torch.addcmul(ones(x, 3), ones(x, 3), ones(y, 3)),
    "atan2": lambda x, y: torch.atan2(ones(x, 3), ones(y, 3)),
    "bilinear": lambda x, y: functional.bilinear(ones(x, 2, 3), ones(x, 2, 3), ones(y, 2, 3, 3)),
    "cross": lambda x, y: torch.cross(ones(x, 3), ones(y, 3), dim=0),
    "dot": lambda x, y: torch.dot(ones(x, 3), ones(y, 3)),
    "index_put": lambda x, y: torch.index_put(ones(x, 3), (ones(torch.int64, 2),), ones(y, 2)),
    "scatter_add": lambda x, y: torch.scatter_add(ones(x, 3), 0, ones(torch.int64, 2), ones(y, 2)),
    "tensordot": lambda x, y: torch.tensordot(ones(x, 3, 3), ones(y, 3, 3), 1),
    "vdot": lambda x, y: torch.vdot(ones(x, 3), ones(y, 3)),
}


@pytest.mark.usefixtures("cuda_rules")
@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize("name", PROMOTED)
def test_defect_7_on_cuda(name: str) -> None:
    function = PROMOTED[name]
    with FakeTensorMode():  # knows devices that are not there
        assert [function(dtype, dtype).dtype for dtype in (HALF, BRAIN, FULL)] == [HALF, BRAIN, FULL]
        for x, y in ((HALF, BRAIN), (BRAIN, HALF), (HALF, FULL), (FULL, BRAIN)):
            assert function(x, y).dtype is FULL


@both
@pytest.mark.filterwarnings("ignore:In CPU autocast")
@pytest.mark.parametrize("dtype", [FULL, torch.float64])
def test_a_dtype_that_is_not_low_is_refused_where_it_would_be_used(region: Any, dtype: torch.dtype) -> None:
    with region("cpu", dtype, enabled=False):
        assert product() is FULL
    taken = True
    try:
        region("cpu", dtype)
    except ValueError:
        taken = False
    assert not taken


def by_copy(layer: nn.Linear, new: Tensor) -> None:
    with torch.no_grad():
        layer.weight.copy_(new)


def by_copy_in_inference_mode(layer: nn.Linear, new: Tensor) -> None:
    with torch.inference_mode():
        layer.weight.copy_(new)


def by_data(layer: nn.Linear, new: Tensor) -> None:
    layer.weight.data.copy_(new)


def by_foreach(layer: nn.Linear, new: Tensor) -> None:
    with torch.no_grad():
        torch._foreach_copy_([layer.weight], [new])


def by_state_dict(layer: nn.Linear, new: Tensor) -> None:
    layer.load_state_dict({"weight": new})


def by_a_number(layer: nn.Linear, new: Tensor) -> None:
    with torch.no_grad():
        layer.weight[:] = new[0, 0].item()


WRITES = [by_copy, by_copy_in_inference_mode, by_data, by_foreach, by_state_dict, by_a_number]


def outputs_before_and_after(region: Any, write: Callable[[nn.Linear, Tensor], None]) -> tuple[float, float]:
    layer, x = nn.Linear(2, 1, bias=False), torch.ones(1, 2)
    layer.load_state_dict({"weight": torch.ones(1, 2)})
    with region:
        before = layer(x).item()
        write(layer, torch.full((1, 2), 3.0))
        return before, layer(x).item()


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("policy", [None, "cuda"])
def test_an_average_swapped_in_is_what_the_next_forward_uses(write: Callable[[nn.Linear, Tensor], None], policy: Any) -> None:
    assert outputs_before_and_after(autocast("cpu", torch.bfloat16, policy=policy), write) == (2.0, 6.0)


def cast_of_weight(y: Tensor) -> Any:
    """The node of y's graph that cast the weight: addmm or mm <- transpose <- cast."""
    assert y.grad_fn is not None
    transpose = next(node for node, _ in y.grad_fn.next_functions if node is not None)
    return transpose.next_functions[0][0]


def test_a_weight_used_twice_is_still_cast_once() -> None:
    layer, x = nn.Linear(2, 2, bias=False), torch.ones(1, 2)
    with autocast("cpu", torch.bfloat16):
        first = cast_of_weight(layer(x))
        x.bfloat16()  # a copy, but into no float32 tensor
        x.bfloat16().float()  # a copy of an operation's, into a tensor of its own
        x.clone().add_(x.bfloat16())
        assert cast_of_weight(layer(x)) is first


def test_copies_do_what_they_did() -> None:
    with autocast("cpu", torch.bfloat16):
        x = torch.zeros(3)
        x.copy_(torch.tensor([1, 2, 3]))
        assert x.tolist() == [1.0, 2.0, 3.0]
        x.fill_(0)[1] = 7
        assert x.tolist() == [0.0, 7.0, 0.0]
        with pytest.raises(RuntimeError, match="must match the size"):
            x.copy_(torch.zeros(2))
        leaf = torch.ones(2, requires_grad=True)
        target = torch.zeros(2)
        target.copy_(leaf)
    target.sum().backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [1.0, 1.0]
