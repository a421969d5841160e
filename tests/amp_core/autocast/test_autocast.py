"""Regions: entering, leaving, nesting, threads, the cast cache, and wrong arguments."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from halfserve import autocast
from halfserve.amp_core.autocast.policy_state import policies_in_force
from tests.amp_core.autocast.conftest import product

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32


def test_defaults_are_the_device_in_use_and_the_dtype_in_force() -> None:
    with autocast():
        assert product() is (BRAIN if not torch.accelerator.is_available() else FULL)
    with autocast("cpu", HALF), autocast("cpu"):
        assert product() is HALF


def test_a_region_left_out_of_order_is_taken_out_from_under_the_others() -> None:
    def suspended() -> Iterator[None]:
        with autocast("cpu", HALF, cache_enabled=False, policy="cuda"):
            yield

    generator = suspended()
    next(generator)
    with autocast("cpu", BRAIN):
        generator.close()  # type: ignore[attr-defined]
        assert product() is BRAIN
        assert torch.ones(2, dtype=BRAIN).exp().dtype is BRAIN


def test_generator_receives_values_exceptions_and_its_end() -> None:
    events: list[Any] = []

    @autocast("cpu", HALF)
    def generate() -> Generator[torch.dtype, str, str]:
        try:
            events.append((yield product()))
            try:
                yield product()
            except KeyError:
                events.append(product())
                yield product()
            return "end"
        finally:
            events.append(product())

    generator = generate()
    assert next(generator) is HALF
    assert generator.send("sent") is HALF
    assert generator.throw(KeyError()) is HALF
    assert product() is FULL
    with pytest.raises(StopIteration, match="end"):
        next(generator)
    assert events == ["sent", HALF, HALF]
    abandoned = generate()
    next(abandoned)
    abandoned.close()
    assert events[3:] == [HALF]


def test_coroutines_are_in_the_region_only_while_they_run() -> None:
    async def others(turns: int) -> set[torch.dtype]:
        seen = set()
        for _ in range(turns):
            seen.add(product())
            await asyncio.sleep(0)
        return seen

    work = autocast("cpu", HALF)(others)

    async def both() -> list[set[torch.dtype]]:
        return list(await asyncio.gather(work(5), others(5), work(5)))

    assert asyncio.run(both()) == [{HALF}, {FULL}, {HALF}]


def test_decorating_what_cannot_be_called() -> None:
    not_callable: Any = 3
    with pytest.raises(TypeError, match=r"autocast\(...\) decorates a function, got a int"):
        autocast("cpu")(not_callable)


def test_a_weight_is_cast_once_in_a_region_unless_the_cache_is_off() -> None:
    layer, x = nn.Linear(4, 4, bias=False), torch.ones(1, 4)

    def casts(*, cache_enabled: bool) -> int:
        with torch.profiler.profile() as profile, autocast("cpu", HALF, cache_enabled=cache_enabled):
            layer(x), layer(x), layer(x)
        return sum(event.count for event in profile.key_averages() if event.key == "aten::_to_copy")

    assert casts(cache_enabled=True) == casts(cache_enabled=False) - 2


def in_a_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_one_thread_at_a_time_caches() -> None:
    seen: list[bool] = []
    with autocast("cpu", torch.float16):
        assert torch.is_autocast_cache_enabled()
        in_a_thread(lambda: in_a_region(seen))
        assert torch.is_autocast_cache_enabled()
    in_a_thread(lambda: in_a_region(seen))
    assert seen == [False, True]


def in_a_region(seen: list[bool]) -> None:
    with autocast("cpu", torch.float16):
        seen.append(torch.is_autocast_cache_enabled())


def test_a_thread_that_ends_inside_a_region_does_not_keep_the_cache() -> None:
    def enter() -> None:
        autocast("cpu", torch.float16).__enter__()

    in_a_thread(enter)
    seen: list[bool] = []
    in_a_region(seen)
    assert seen == [True]


def test_a_region_of_torchs_finds_nothing_that_one_of_ours_has_left() -> None:
    layer, x = nn.Linear(4, 4, bias=False), torch.ones(2, 4)
    with autocast("cpu", torch.bfloat16):
        layer(x)
    layer.weight.data.mul_(2)  # of which nobody tells
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), x.bfloat16() @ layer.weight.bfloat16().T)


@pytest.fixture(params=["outside", "inside a region"])
def around(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run each test outside of any region and inside of one, which must be as before in the end."""
    with ExitStack() as stack:
        if request.param != "outside":
            stack.enter_context(autocast("cpu", BRAIN, policy="cuda"))
        before = product(), torch.ones(2, dtype=HALF).softmax(0).dtype, torch.is_autocast_cache_enabled()
        yield
        assert (product(), torch.ones(2, dtype=HALF).softmax(0).dtype, torch.is_autocast_cache_enabled()) == before
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int8, torch.complex64, torch.float8_e5m2, "float16"])
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.usefixtures("around")
def test_a_dtype_that_is_not_low(device_type: str, dtype: Any) -> None:
    with pytest.raises(ValueError, match="dtype must be torch.float16 or torch.bfloat16, got .*; for float32: autocast"):
        autocast(device_type, dtype)


@pytest.mark.parametrize(
    ("device_type", "error", "message"),
    [
        ("cup", RuntimeError, "torch has no autocast for the device type 'cup'; expected one such as 'cuda' or 'cpu'"),
        ("", RuntimeError, "torch has no autocast for the device type ''"),
        ("CPU", RuntimeError, "torch has no autocast for the device type 'CPU'"),
        ("meta", RuntimeError, "torch has no autocast for the device type 'meta'"),
        ("cuda:0", ValueError, "must be the name of a kind of device, such as 'cuda' or 'cpu'; got 'cuda:0'"),
        (0, ValueError, "must be the name of a kind of device"),
        (torch.device("cpu"), ValueError, "must be the name of a kind of device"),
    ],
)
@pytest.mark.usefixtures("around")
def test_a_device_type_that_is_none(device_type: Any, error: type[Exception], message: str) -> None:
    for policy in (None, "cuda"):
        with pytest.raises(error, match=message):
            autocast(device_type, policy=policy)


@pytest.mark.parametrize("flag", [1, 0, "yes", np.bool_(True)])
@pytest.mark.parametrize("name", ["enabled", "cache_enabled"])
@pytest.mark.usefixtures("around")
def test_a_flag_that_is_no_bool_leaves_no_policy_in_force(name: str, flag: Any) -> None:
    before, flags = policies_in_force(), {name: flag}
    with autocast("cpu", HALF, enabled=True):
        pass  # from here on torch need not be asked again whether it can do this
    with pytest.raises(TypeError, match=f"^{name} must be True or False, got {re.escape(repr(flag))}$"):
        autocast("cpu", HALF, policy="cuda+fp32:mm", **flags).__enter__()
    assert policies_in_force() is before


@pytest.mark.usefixtures("around")
def test_leaving_what_was_not_entered_or_was_left_already() -> None:
    region = autocast("cpu", HALF)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="not open in this thread; leave a region once, in the thread that entered it"):
            region.__exit__(None, None, None)
        with region:
            assert product() is HALF


@pytest.mark.usefixtures("around")
def test_leaving_in_another_thread_that_has_a_region_of_its_own() -> None:
    region, errors = autocast("cpu", HALF), []

    def leave_elsewhere() -> torch.dtype:
        with autocast("cpu", BRAIN):
            try:
                region.__exit__(None, None, None)
            except RuntimeError as error:
                errors.append(str(error))
            return product()

    with region, ThreadPoolExecutor(1) as pool:
        assert pool.submit(leave_elsewhere).result() is BRAIN
        assert pool.submit(product).result() is FULL
        assert product() is HALF
    assert len(errors) == 1
    assert "leave a region once, in the thread that entered it" in errors[0]
