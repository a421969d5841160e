"""Entering and leaving an autocast region: torch's own thread-local state, saved on a stack per thread."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from amp_core.casting import cast_cache
from amp_core.casting.policy_kernels import require_kernels
from amp_core.casting.policy_state import Saved, policies_in_force, put_in_force, restore
from amp_core.casting.promotion_repair import repair_promotion
from amp_core.casting.untraced import untraced

if TYPE_CHECKING:
    from amp_core.policy import Policy


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """What a region asks for.

    Attributes:
        device_type: Such as `cpu` or `cuda`.
        dtype: float16 or bfloat16.
        enabled: False makes operations run in the dtypes they are given.
        cache_enabled: Whether a weight that is cast twice in the region is cast once.
        policy: None keeps the policy of the region around this one.
    """

    device_type: str
    dtype: torch.dtype
    enabled: bool
    cache_enabled: bool
    policy: Policy | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Before:
    """The state that leaving puts back."""

    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache_enabled: bool
    policies: Saved | None
    owns_cache: bool
    changes_dtype: bool


class _Stack(threading.local):
    """The states before each region that is open in this thread."""

    def __init__(self) -> None:
        self.before: list[_Before] = []


_stack = _Stack()


@untraced
def enter(region: Region) -> None:
    """Open a region in this thread. Changes nothing if it raises."""
    device_type, stack = region.device_type, _stack.before
    repair_promotion()
    before = _Before(
        device_type=device_type,
        enabled=torch.is_autocast_enabled(device_type),
        dtype=torch.get_autocast_dtype(device_type),
        cache_enabled=torch.is_autocast_cache_enabled(),
        policies=None if region.policy is None else enforce(region.policy, device_type),
        owns_cache=stack[-1].owns_cache if stack else cast_cache.acquire(),
        changes_dtype=region.dtype is not torch.get_autocast_dtype(device_type),
    )
    if before.owns_cache and before.changes_dtype:
        torch.clear_autocast_cache()
    torch.set_autocast_enabled(device_type, region.enabled)
    torch.set_autocast_dtype(device_type, region.dtype)
    torch.set_autocast_cache_enabled(region.cache_enabled and before.owns_cache)
    # Keeps a region of torch's own inside this one from emptying the cache when it leaves.
    torch.autocast_increment_nesting()
    stack.append(before)


def enforce(policy: Policy, device_type: str) -> Saved | None:
    """Put a policy in force in this thread; returns what `restore` takes, None if it is in force already."""
    around = policies_in_force()
    policies = around.with_policy(device_type, policy)
    if policies is around:
        return None
    require_kernels(policy.difference(device_type))
    return put_in_force(policies)


@untraced
def leave() -> None:
    """Close this thread's innermost region and put back what was before it.

    Raises:
        RuntimeError: If this thread has no region open.
    """
    if not _stack.before:
        raise RuntimeError("no autocast region is open in this thread; leave a region in the thread that entered it, and once")
    before = _stack.before.pop()
    torch.autocast_decrement_nesting()
    if before.owns_cache and before.changes_dtype:
        torch.clear_autocast_cache()
    torch.set_autocast_enabled(before.device_type, before.enabled)
    torch.set_autocast_dtype(before.device_type, before.dtype)
    torch.set_autocast_cache_enabled(before.cache_enabled)
    if before.policies is not None:
        restore(before.policies)
    if before.owns_cache and not _stack.before:
        cast_cache.release()
