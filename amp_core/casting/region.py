"""Entering and leaving an autocast region: torch's own thread-local state, saved on a stack per thread."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from amp_core.casting import cast_cache
from amp_core.casting.lstm_repair import repair_lstm
from amp_core.casting.policy_kernels import require_kernels
from amp_core.casting.policy_state import Saved, policies_in_force, put_in_force, restore
from amp_core.casting.promotion_repair import repair_promotion
from amp_core.casting.untraced import untraced
from amp_core.casting.weight_writes import watch_weight_writes
from amp_core.policy.native_rules import has_autocast

if TYPE_CHECKING:
    from amp_core.policy import Policy


@dataclass(slots=True, eq=False)
class Region:
    """What a region asks for; nothing changes it. Two regions are never equal: each is left by itself.

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


@dataclass(slots=True)
class _Entry:
    """A region that is open, and the state that leaving it puts back."""

    region: Region
    enabled: bool
    dtype: torch.dtype
    cache_enabled: bool
    policies: Saved | None
    owns_cache: bool


class _Stack(threading.local):
    """The regions that are open in this thread, the innermost last."""

    def __init__(self) -> None:
        self.entries: list[_Entry] = []


_stack = _Stack()


@untraced
def enter(region: Region) -> None:
    """Open a region in this thread. Changes nothing if it raises."""
    device_type, entries = region.device_type, _stack.entries
    if device_type not in _prepared:
        prepare_torch(device_type)
    entry = _Entry(
        region,
        torch.is_autocast_enabled(device_type),
        torch.get_autocast_dtype(device_type),
        torch.is_autocast_cache_enabled(),
        None if region.policy is None else enforce(region.policy, device_type),
        entries[-1].owns_cache if entries else cast_cache.acquire(),
    )
    if entries:
        _keep_dtypes_apart(entry, entries)
    torch.set_autocast_enabled(device_type, region.enabled)
    torch.set_autocast_dtype(device_type, region.dtype)
    torch.set_autocast_cache_enabled(region.cache_enabled and entry.owns_cache)
    # Keeps a region of torch's own inside this one from emptying the cache when it leaves.
    torch.autocast_increment_nesting()
    entries.append(entry)


_prepared: set[str] = set()


def prepare_torch(device_type: str) -> None:
    """Install what regions of a device need in torch, once per process; nothing if it has no autocast, of which torch tells."""
    if not has_autocast(device_type):
        return
    repair_promotion(device_type)
    repair_lstm()
    watch_weight_writes(device_type)
    cast_cache.watch_optimizers()
    _prepared.add(device_type)


# What torch.compiler.assume_constant_result does, without its loading Dynamo: a call runs as it is while Dynamo traces.
prepare_torch._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001  (see above)


@untraced
def leave(region: Region) -> None:
    """Close a region, this thread's innermost as a rule, and put back what was before it.

    A region that is not the innermost (a generator was closed in the middle of its block) is taken out from under the others:
    what it would have put back is put back when they leave.

    Raises:
        RuntimeError: If the region is not open in this thread.
    """
    entries = _stack.entries
    place = len(entries) - 1
    while place >= 0 and entries[place].region is not region:
        place -= 1
    if place < 0:
        raise RuntimeError(
            "this autocast region is not open in this thread; leave a region once, in the thread that entered it"
        )
    entry = entries.pop(place)
    torch.autocast_decrement_nesting()
    if place < len(entries):
        _hand_up(entry, entries[place:])
    else:
        torch.set_autocast_enabled(region.device_type, entry.enabled)
        torch.set_autocast_dtype(region.device_type, entry.dtype)
        torch.set_autocast_cache_enabled(entry.cache_enabled)
        if entry.policies is not None:
            restore(entry.policies)
    if entries:
        _keep_dtypes_apart(entry, entries)
    elif entry.owns_cache:
        cast_cache.release()


def _hand_up(entry: _Entry, above: list[_Entry]) -> None:
    device_type = entry.region.device_type
    same_device = next((other for other in above if other.region.device_type == device_type), None)
    if same_device is None:
        torch.set_autocast_enabled(device_type, entry.enabled)
        torch.set_autocast_dtype(device_type, entry.dtype)
    else:
        same_device.enabled, same_device.dtype = entry.enabled, entry.dtype
    above[0].cache_enabled = entry.cache_enabled
    if entry.policies is not None:
        other = next((other for other in above if other.policies is not None), None)
        if other is None:
            restore(entry.policies)
        else:
            other.policies = entry.policies


def _keep_dtypes_apart(entry: _Entry, around: list[_Entry]) -> None:
    # torch's cache does not tell one dtype's cast from another's. The regions count, not the dtype in force: torch's own
    # regions in between change that and keep the cache.
    region = entry.region
    dtype = next((other.region.dtype for other in reversed(around) if other.region.device_type == region.device_type), None)
    if entry.owns_cache and dtype is not region.dtype:
        torch.clear_autocast_cache()


def enforce(policy: Policy, device_type: str) -> Saved | None:
    """Put a policy in force in this thread; returns what `restore` takes, None if it is in force already."""
    around = policies_in_force()
    policies = around.with_policy(device_type, policy)
    if policies is around:
        return None
    require_kernels(policies)
    return put_in_force(policies)
