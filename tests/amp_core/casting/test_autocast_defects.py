"""torch.autocast's own defects (1 to 7 of the list this room keeps) are absent here."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from amp_core import autocast

if TYPE_CHECKING:
    from collections.abc import Iterator

LOW = (torch.float16, torch.bfloat16)


def product() -> torch.dtype:
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


@pytest.fixture(autouse=True)
def outside_any_region() -> Iterator[None]:
    yield
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cpu") is torch.bfloat16
    assert torch.is_autocast_cache_enabled()


def test_defect_1_one_instance_entered_twice() -> None:
    region = autocast("cpu", torch.float16)
    with region:
        with region:
            assert product() is torch.float16
        assert product() is torch.float16
    assert product() is torch.float32


def test_defect_1_decorated_recursion() -> None:
    @autocast("cpu", torch.float16)
    def recurse(depth: int) -> list[torch.dtype]:
        return [product()] + (recurse(depth - 1) if depth else [])

    assert recurse(3) == [torch.float16] * 4
    assert product() is torch.float32


def test_defect_2_one_decorated_function_in_two_threads() -> None:
    both_inside = threading.Barrier(2, timeout=10)

    @autocast("cpu", torch.float16)
    def inside() -> torch.dtype:
        both_inside.wait()
        return product()

    def with_own_state() -> tuple[torch.dtype, torch.dtype]:
        with autocast("cpu", torch.bfloat16):
            return inside(), product()

    def without() -> tuple[torch.dtype, torch.dtype]:
        return inside(), product()

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(with_own_state), pool.submit(without)
        assert first.result() == (torch.float16, torch.bfloat16)
        assert second.result() == (torch.float16, torch.float32)


def test_defect_3_decorated_generator_runs_in_the_region_and_its_consumer_does_not() -> None:
    @autocast("cpu", torch.float16)
    def generate() -> Iterator[torch.dtype]:
        yield product()
        yield product()

    seen = [(dtype, product()) for dtype in generate()]
    assert seen == [(torch.float16, torch.float32)] * 2


@pytest.mark.parametrize("outer", LOW)
@pytest.mark.parametrize("inner", LOW)
def test_defect_4_nested_region_of_another_dtype_casts_the_weight_again(outer: torch.dtype, inner: torch.dtype) -> None:
    layer = nn.Linear(4, 4)
    x = torch.randn(2, 4)
    with autocast("cpu", outer):
        assert layer(x).dtype is outer
        with autocast("cpu", inner):
            assert layer(x).dtype is inner
        assert layer(x).dtype is outer


@pytest.mark.parametrize("fused", [False, True])
def test_defect_5_weight_changed_by_an_optimizer_is_cast_again(fused: bool) -> None:
    layer = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1.0, fused=fused)
    x = torch.ones(2, 4)
    with autocast("cpu", torch.bfloat16):
        layer(x).sum().backward()
        optimizer.step()
        after = layer(x)
    expected = x.bfloat16() @ layer.weight.detach().bfloat16().T
    torch.testing.assert_close(after.detach(), expected, rtol=0, atol=0)


def test_defect_6_another_thread_leaving_its_region_leaves_this_ones_cache_alone() -> None:
    layer = nn.Linear(4, 4, bias=False)
    x = torch.ones(2, 4)

    def enter_and_leave() -> None:
        with autocast("cpu", torch.bfloat16):
            layer(x)

    with autocast("cpu", torch.bfloat16):
        before = layer(x)
        # The only sign of a cached copy: a write that torch cannot see does not show until the cache is emptied.
        layer.weight.data.zero_()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(enter_and_leave).result()
        assert torch.equal(layer(x), before)
        torch.clear_autocast_cache()
        assert torch.equal(layer(x), torch.zeros_like(before))


def test_defect_6_threads_of_different_dtypes_never_share_a_cached_weight() -> None:
    layer = nn.Linear(4, 4)
    x = torch.randn(2, 4)
    both_inside = threading.Barrier(2, timeout=10)

    def run(dtype: torch.dtype) -> set[torch.dtype]:
        with autocast("cpu", dtype):
            both_inside.wait()
            return {layer(x).dtype for _ in range(20)}

    with ThreadPoolExecutor(2) as pool:
        results = [pool.submit(run, dtype) for dtype in LOW]
        assert [result.result() for result in results] == [{dtype} for dtype in LOW]


@pytest.mark.parametrize("policy", [None, "cuda"])
@pytest.mark.parametrize("region", LOW)
def test_defect_7_both_low_dtypes_meet_in_a_widest_operation(policy: str | None, region: torch.dtype) -> None:
    halves, others = torch.ones(3, dtype=torch.float16), torch.ones(3, dtype=torch.bfloat16)
    with autocast("cpu", region, policy=policy):
        for other in LOW:
            assert torch.cat([torch.ones(3, dtype=other)] * 2).dtype is other
        assert torch.cat([halves, others]).dtype is torch.float32
        assert torch.stack([halves, others, torch.ones(3)]).dtype is torch.float32
        assert torch.cat([halves.double(), halves]).dtype is torch.float64


def test_defect_7_operations_that_do_not_promote_by_themselves() -> None:
    halves, others = torch.ones(3, dtype=torch.float16), torch.ones(3, dtype=torch.bfloat16)
    with autocast("cpu", torch.bfloat16, policy="cuda"):
        assert torch.dot(halves, others).dtype is torch.float32
        assert torch.dot(halves, halves).dtype is torch.float16
