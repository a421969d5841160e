"""Regions that cannot be made, entered or left: one clear error each, and the state as it was."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch

from amp_core import autocast
from amp_core.casting.policy_state import policies_in_force

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32


def product() -> torch.dtype:
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


@pytest.fixture(autouse=True, params=["outside", "inside a region"])
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
        (torch.device("cpu"), ValueError, "must be the name of a kind of device"),
    ],
)
def test_a_device_type_that_is_none(device_type: Any, error: type[Exception], message: str) -> None:
    for policy in (None, "cuda"):
        with pytest.raises(error, match=message):
            autocast(device_type, policy=policy)


@pytest.mark.parametrize("flag", [1, 0, "yes", np.bool_(True)])
@pytest.mark.parametrize("name", ["enabled", "cache_enabled"])
def test_a_flag_that_is_no_bool_leaves_no_policy_in_force(name: str, flag: Any) -> None:
    before, flags = policies_in_force(), {name: flag}
    with autocast("cpu", HALF, enabled=True):
        pass  # from here on torch need not be asked again whether it can do this
    with pytest.raises(TypeError, match=f"^{name} must be True or False, got {re.escape(repr(flag))}$"):
        autocast("cpu", HALF, policy="cuda+fp32:mm", **flags).__enter__()
    assert policies_in_force() is before


def test_leaving_what_was_not_entered_or_was_left_already() -> None:
    region = autocast("cpu", HALF)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="not open in this thread; leave a region once, in the thread that entered it"):
            region.__exit__(None, None, None)
        with region:
            assert product() is HALF


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


def test_a_suspended_block_that_is_closed_inside_of_another_region() -> None:
    def suspended(dtype: torch.dtype) -> Iterator[torch.dtype]:
        with autocast("cpu", dtype):
            yield product()

    generator = suspended(HALF)
    assert next(generator) is HALF
    with autocast("cpu", BRAIN):
        generator.close()  # type: ignore[attr-defined]
        assert product() is BRAIN
