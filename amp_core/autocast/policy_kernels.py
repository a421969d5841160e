"""The kernels through which policies change operations, at a dispatch key of their own."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import _ops
from torch._ops import OpOverload
from torch.utils import checkpoint

from halfserve.amp_core.autocast.policy_state import KEY, KEY_NAME, Policies, policies_in_force, put_in_force, restore, untraced
from halfserve.amp_core.policy import Rule, operations
from halfserve.amp_core.policy.operations import autocast_key, find_overload, qualified_name

_C = torch._C  # noqa: SLF001  (dispatch keys have no public face)
_OURS, _BELOW = _C.DispatchKeySet(KEY), _C._dispatch_keyset_full_after(KEY)  # noqa: SLF001  (see above)

EXPORT_REFUSAL = (
    "torch.export cannot write down an autocast policy that differs from torch's own: the exported program would run without "
    "it; export the module outside of the region, or leave out policy="
)


def make_kernel(overload: OpOverload) -> Callable[..., Any]:
    """Return the kernel of one overload: this thread's policy, and torch's own behaviour where the policy has no rule."""
    name = qualified_name(overload)
    dtype_position = _dtype_position(overload)
    takes_numbers = _C._should_allow_numbers_as_tensors(_bare(name))  # noqa: SLF001  (no public way to ask)

    @untraced
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        for device_type, rules in policies_in_force().rules:
            rule = rules.get(name)
            if rule is None or not torch.is_autocast_enabled(device_type):
                continue
            eligible = eligible_tensors((*args, *kwargs.values()) if kwargs else args, device_type)
            if eligible:
                return _apply(rule, device_type, eligible, args, kwargs)
        if takes_numbers:
            # A redispatch does not accept numbers in tensors' places. Such operations are not composites.
            with _C._ExcludeDispatchKeyGuard(_OURS):  # noqa: SLF001  (no public form; torch's own casts use it)
                return overload(*args, **kwargs)
        # With torch's autocast and ours enabled: the parts of a composite operation must still be cast.
        return overload.redispatch(keyset & _BELOW, *args, **kwargs)

    def _apply(
        rule: Rule, device_type: str, eligible: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        _refuse(rule, name)
        with _C._ExcludeDispatchKeyGuard(_without(device_type)):  # noqa: SLF001  (no public form; torch's own casts use it)
            if dtype_position is not None and _has_dtype(args, kwargs, dtype_position):
                return overload(*args, **kwargs)
            dtype = _target_dtype(rule, device_type, eligible)
            if any([tensor.dtype is not dtype for tensor in eligible]):  # noqa: C419  (a generator costs more than it saves)
                args = cast_all(args, device_type, dtype)
                kwargs = {key: cast_all(value, device_type, dtype) for key, value in kwargs.items()}
            return overload(*args, **kwargs)

    return kernel


def _refuse(rule: Rule, name: str) -> None:
    if rule is Rule.BAN:
        raise RuntimeError(_ban_text(name))
    if torch.compiler.is_exporting():
        raise RuntimeError(EXPORT_REFUSAL)


def _without(device_type: str) -> Any:
    found = _KEYSETS.get(device_type)
    if found is None:
        found = _KEYSETS[device_type] = _OURS | _C.DispatchKeySet(getattr(_C.DispatchKey, autocast_key(device_type)))
    return found


_KEYSETS: dict[str, Any] = {}


def _dtype_position(overload: OpOverload) -> int | None:
    names = [argument.name for argument in overload._schema.arguments]  # noqa: SLF001  (torch offers the schema under no other name)
    return names.index("dtype") if "dtype" in names else None


def _has_dtype(args: tuple[Any, ...], kwargs: dict[str, Any], position: int) -> bool:
    return kwargs.get("dtype") is not None or (len(args) > position and args[position] is not None)


def _target_dtype(rule: Rule, device_type: str, eligible: list[torch.Tensor]) -> torch.dtype:
    if rule is Rule.LOW:
        return torch.get_autocast_dtype(device_type)
    if rule is Rule.FP32:
        return torch.float32
    return widest_dtype(eligible)


def widest_dtype(eligible: list[torch.Tensor]) -> torch.dtype:
    """Return the widest dtype of these tensors: float32 for two different low-precision dtypes."""
    dtypes = {tensor.dtype for tensor in eligible}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


# Not float64, nor the formats of 8 bits and less, which have no arithmetic.
_CASTABLE = {torch.float16, torch.bfloat16, torch.float32}


def eligible_tensors(values: Iterable[Any], device_type: str) -> list[torch.Tensor]:
    """Return the tensors of a call, in lists too, that autocast may cast on a device."""
    found: list[torch.Tensor] = []
    is_there = f"is_{device_type}"  # asked five times faster than device.type
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.dtype in _CASTABLE and getattr(value, is_there):
                found.append(value)
        elif isinstance(value, (list, tuple)):
            found += eligible_tensors(value, device_type)
    return found


def cast_all(value: Any, device_type: str, dtype: torch.dtype) -> Any:
    """Return an argument with every eligible tensor in it cast."""
    if isinstance(value, torch.Tensor):
        is_castable = value.dtype in _CASTABLE and value.dtype is not dtype and value.device.type == device_type
        return value.to(dtype) if is_castable else value
    return type(value)([cast_all(item, device_type, dtype) for item in value]) if isinstance(value, (list, tuple)) else value


def _bare(name: str) -> str:
    return name.removeprefix("aten::").partition(".")[0]


def _ban_text(name: str) -> str:
    op = _bare(name)
    instead = operations.INSTEAD_OF.get(op)
    advice = f"use {instead}" if instead else "leave it out, or run it in an inner region with enabled=False"
    return f"{op} is unsafe to autocast and banned by this region's policy; {advice}"


# `torch.utils.checkpoint` saves the autocast state of the tensors' device and of the CPU, and restores it for the recomputation
# during backward. Policies live in the state of other devices, and there is no hook for them: activations would be recomputed
# under other rules, silently so in the reentrant form. So the two functions that receive the user's function are wrapped, from
# the first region with a policy on.

_lock = threading.Lock()
_is_done = False


def recompute_under_policies() -> None:
    """Make checkpointed functions recompute under the policies in force at their forward, once per process."""
    global _is_done  # noqa: PLW0603  (torch's module is one per process)
    if _is_done:
        return
    with _lock:
        if not _is_done:
            forward = checkpoint.CheckpointFunction.forward
            checkpoint.CheckpointFunction.forward = staticmethod(_reentrant(forward))  # type: ignore[method-assign]
            without = checkpoint._checkpoint_without_reentrant_generator  # noqa: SLF001  (the only place, see above)
            checkpoint._checkpoint_without_reentrant_generator = _not_reentrant(without)  # noqa: SLF001  (see above)
            _is_done = True


def _reentrant(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def with_policies(ctx: Any, function: Callable[..., Any], *args: Any) -> Any:
        return forward(ctx, _under_same_policies(function), *args)

    return with_policies


def _not_reentrant(generator: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(generator)
    def with_policies(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return generator(_under_same_policies(function), *args, **kwargs)

    return with_policies


def _under_same_policies(function: Callable[..., Any]) -> Callable[..., Any]:
    policies = policies_in_force()  # None in force is as good as any: backward may run in a region that has one

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if policies_in_force() is policies:
            return function(*args, **kwargs)
        saved = put_in_force(policies)
        try:
            return function(*args, **kwargs)
        finally:
            restore(saved)

    return run


# torch casts at the dispatch key `Autocast<Device>`, above autograd: its casts are differentiated and reach operations inside
# C++ composites. A policy's kernels do so one key above, at `AutocastPrivateUse1`, which no tensor of this process has. A
# region with a policy includes that key in its thread's dispatch; all other code, also regions without a policy and torch's
# own, never reaches the kernels. So they are installed with the first region that needs them, and never removed.


class _Kernels:
    """The installed kernels, in libraries by namespace: a library removes its kernels when it is collected."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.libraries: dict[str, Any] = {}
        self.installed: set[str] = set()
        self.served: set[Policies] = set()

    def require(self, policies: Policies) -> None:
        with self.lock:
            for name in {name for _, rules in policies.rules for name in rules} - self.installed:
                namespace, _, overload = name.partition("::")
                # Straight to the dispatcher: Library.impl would warn about overriding another kernel.
                self._library(namespace).m.impl(overload, KEY_NAME, make_kernel(find_overload(name)), True)
                self.installed.add(name)
            self.served.add(policies)

    def _library(self, namespace: str) -> Any:
        if not self.libraries:
            # Operations without a kernel of ours fall through; torch registers that fallback for its own devices only.
            self.libraries["_"] = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
            self.libraries["_"].fallback(torch.library.fallthrough_kernel, KEY_NAME)
            _let_higher_order_ops_pass()
        if namespace not in self.libraries:
            self.libraries[namespace] = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
        return self.libraries[namespace]


def _let_higher_order_ops_pass() -> None:
    # Higher-order operations (cond, scan, flex_attention) have dispatch tables of their own, without fallbacks: let the
    # existing and the future ones fall through. The operations in their functions reach the kernels.
    _ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(KEY)  # noqa: SLF001  (the only place)
    for operation in _ops._higher_order_ops.values():  # noqa: SLF001  (see above)
        operation.fallthrough(KEY)  # type: ignore[no-untyped-call]


_kernels = _Kernels()


def require_kernels(policies: Policies) -> None:
    """Install the missing kernels of these policies."""
    if policies not in _kernels.served:
        recompute_under_policies()
        _kernels.require(policies)
