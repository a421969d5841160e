"""Autocast regions: entering and leaving, on a stack per thread that saves torch's own thread-local state."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.fx.node import has_side_effect
from torch.optim.optimizer import register_optimizer_step_post_hook

from halfserve.amp_core.autocast.policy_kernels import require_kernels
from halfserve.amp_core.autocast.policy_state import Saved, policies_in_force, put_in_force, restore, untraced
from halfserve.amp_core.autocast.torch_kernels import repair_lstm, repair_promotion, watch_weight_writes
from halfserve.amp_core.policy import Policy
from halfserve.amp_core.policy.operations import has_autocast

# torch has one cast cache for the whole process: float32 leaf -> its low-precision copy, regardless of dtype and thread, and
# without a check for changed leaves. Here it belongs to one thread at a time, the first to open an outermost region; the others
# cast without it, which costs nothing if each weight is used once per region. So no thread empties another's cache, reads its
# float16 copy in a bfloat16 region, or finds a copy of a finished region.

# Held by the owner of the cache from entering its outermost region to leaving it.
_cache = threading.Lock()
_owner = 0
_watching = threading.Lock()


def acquire() -> bool:
    """Take torch's cast cache for this thread's outermost region, unless another live thread has it."""
    global _owner  # noqa: PLW0603  (torch's cache is one per process, so is its owner)
    if not _cache.acquire(blocking=False) and _owner in sys._current_frames():  # noqa: SLF001  (the one list of live threads)
        return False
    # Free, or its owner's thread has ended inside a region.
    _owner = threading.get_ident()
    torch.clear_autocast_cache()  # remove copies that torch's own regions may have left
    return True


def release() -> None:
    """Empty the cache and leave it to the next thread."""
    torch.clear_autocast_cache()
    _cache.release()


def watch_optimizers() -> None:
    """Empty the cache after every optimizer's step, from now on."""
    # Fused optimizers and writes through .data do not bump a tensor's version: the step itself is the reliable sign.
    if _watching.acquire(blocking=False):
        register_optimizer_step_post_hook(lambda *_: torch.clear_autocast_cache())


@dataclass(slots=True, eq=False)
class AutocastRegion:
    """The settings of a region, immutable in practice. Two regions are never equal: each is left by itself."""

    device_type: str  # torch's name, such as `cpu` or `cuda`
    dtype: torch.dtype  # float16 or bfloat16
    enabled: bool  # False runs operations in the dtypes of their inputs
    cache_enabled: bool  # whether a weight that is cast twice in the region is cast once
    policy: Policy | None  # None keeps the policy of the region around this one


@dataclass(slots=True)
class _Entry:
    """An open region, and the state to restore when it is left."""

    region: AutocastRegion
    enabled: bool
    dtype: torch.dtype
    cache_enabled: bool
    policies: Saved | None
    owns_cache: bool


class _Stack(threading.local):
    """The open regions of this thread, the innermost last."""

    def __init__(self) -> None:
        self.entries: list[_Entry] = []


_stack = _Stack()


@untraced
def enter(region: AutocastRegion) -> None:
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
        entries[-1].owns_cache if entries else acquire(),
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
    """Install the kernels that regions of a device need in torch, once per process; nothing if it has no autocast."""
    if not has_autocast(device_type):
        return
    repair_promotion(device_type)
    repair_lstm()
    watch_weight_writes(device_type)
    watch_optimizers()
    _prepared.add(device_type)


# Does what torch.compiler.assume_constant_result does, without loading Dynamo: calls are not traced.
prepare_torch._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001  (see above)


@untraced
def leave(region: AutocastRegion) -> None:
    """Close a region, usually this thread's innermost, and restore the state before it.

    A region that is not the innermost (a generator was closed inside its block) is taken out from under the others: they
    restore its saved state when they leave.

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
        release()


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
    # torch's cache does not distinguish dtypes. The dtype of the regions counts, not the dtype in force: torch's own regions in
    # between change that and keep the cache.
    region = entry.region
    dtype = next((other.region.dtype for other in reversed(around) if other.region.device_type == region.device_type), None)
    if entry.owns_cache and dtype is not region.dtype:
        torch.clear_autocast_cache()


def enforce(policy: Policy, device_type: str) -> Saved | None:
    """Put a policy in force in this thread; returns the argument of `restore`, None if it is in force already."""
    around = policies_in_force()
    policies = around.with_policy(device_type, policy)
    if policies is around:
        return None
    require_kernels(policies)
    return put_in_force(policies)


class _Traced(threading.local):
    def __init__(self) -> None:
        self.saved: list[Saved | None] = []


_traced = _Traced()


@contextmanager
def traced_region(
    device_type: str, dtype: torch.dtype | None, enabled: bool, cache_enabled: bool | None, policy: str
) -> Iterator[None]:
    """Provide a region of torch's own with a policy in force, which torch.compile can trace into one graph.

    Two calls in the graph enforce the policy and restore the state before. They act while the graph's operations are traced
    further, where the policy's kernels insert its casts; the compiled code contains neither. The policy's string form is part
    of the graph, so no cache confuses the code of two policies.
    """
    with torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled):
        _enter_policy(policy, device_type)
        try:
            yield
        finally:
            _exit_policy()


def _enter_policy(policy: str, device_type: str) -> None:
    _traced.saved.append(enforce(Policy.parse(policy), device_type))


def _exit_policy() -> None:
    saved = _traced.saved.pop()
    if saved is not None:
        restore(saved)


def _unwind(*_: object) -> None:
    while _traced.saved:
        _exit_policy()


def prepare() -> None:
    """Prepare Dynamo, which is tracing, for a region with a policy.

    Dynamo puts the two calls into its graphs as they are, keeps them although their results are unused, and restores the policy
    when it abandons a trace in the middle of a region, as it does to trace a function again in another way.
    """
    functions: list[Callable[..., None]] = [_enter_policy, _exit_policy]
    for function in functions:
        torch.compiler.allow_in_graph(function)  # type: ignore[no-untyped-call]
        has_side_effect(function)
    from torch._dynamo.callback import callback_handler  # noqa: PLC0415  (only where it is loaded already)
    from torch._dynamo.symbolic_convert import InstructionTranslator  # noqa: PLC0415  (see above)

    InstructionTranslator.current_tx().output.add_cleanup_hook(_unwind)
    if _unwind not in callback_handler.end_callbacks:
        callback_handler.register_end_callback(_unwind)


def _type_of_regions(_: object) -> type:
    return torch.autocast


def may_have_a_policy() -> bool:
    """Return whether the current trace can keep a policy, which torch.export cannot.

    Also gives Dynamo's object for torch.autocast a Python type: torch 2.11 asks for it when `__new__` makes one, and fails
    without.
    """
    from torch._dynamo.variables.ctx_manager import AutocastModeVariable  # noqa: PLC0415  (only where it is loaded already)

    if "python_type" not in vars(AutocastModeVariable):
        AutocastModeVariable.python_type = _type_of_regions  # type: ignore[assignment,method-assign]  # (mypy reads it as bound)
    return not torch.compiler.is_exporting()


# Does what torch.compiler.assume_constant_result does, without loading Dynamo: calls are not traced. Traced, torch 2.11's
# is_exporting is true under torch.compile, too.
prepare._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001  (see above)
may_have_a_policy._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001  (see above)
