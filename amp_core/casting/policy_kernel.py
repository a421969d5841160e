"""The kernel through which policies change one operation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from amp_core.casting.policy_state import KEY, policies_in_force
from amp_core.casting.untraced import untraced
from amp_core.policy import Rule, op_lists
from amp_core.policy.native_rules import autocast_key
from amp_core.policy.op_names import qualified_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch._ops import OpOverload

_C = torch._C  # noqa: SLF001  (dispatch keys have no public face)
_OURS, _BELOW = _C.DispatchKeySet(KEY), _C._dispatch_keyset_full_after(KEY)  # noqa: SLF001  (see above)

EXPORT_REFUSAL = (
    "torch.export cannot write down an autocast policy that differs from torch's own: the exported program would run without "
    "it; export the module outside of the region, or leave out policy="
)


def make_kernel(overload: OpOverload) -> Callable[..., Any]:
    """The kernel of one overload: what this thread's policy says, and torch's own behaviour where it says nothing."""
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
            # In tensors' places, which a redispatch does not understand. Such operations are not made of others.
            with _C._ExcludeDispatchKeyGuard(_OURS):  # noqa: SLF001  (no public form; torch's own casts use it)
                return overload(*args, **kwargs)
        # Not without torch's autocast and ours: the parts of a composite operation must still be cast.
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
    """What these tensors meet in: two different low-precision dtypes in float32."""
    dtypes = {tensor.dtype for tensor in eligible}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


# float64 is left alone, and so are the formats of 8 bits and less, which no arithmetic takes.
_CASTABLE = {torch.float16, torch.bfloat16, torch.float32}


def eligible_tensors(values: Iterable[Any], device_type: str) -> list[torch.Tensor]:
    """Those of a call's tensors, in lists too, that autocast may cast on a device."""
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
    """An argument with every eligible tensor in it cast; all else stays as it is."""
    if isinstance(value, torch.Tensor):
        is_castable = value.dtype in _CASTABLE and value.dtype is not dtype and value.device.type == device_type
        return value.to(dtype) if is_castable else value
    return type(value)([cast_all(item, device_type, dtype) for item in value]) if isinstance(value, (list, tuple)) else value


def _bare(name: str) -> str:
    return name.removeprefix("aten::").partition(".")[0]


def _ban_text(name: str) -> str:
    op = _bare(name)
    instead = op_lists.INSTEAD_OF.get(op)
    advice = f"use {instead}" if instead else "leave it out, or run it in an inner region with enabled=False"
    return f"{op} is unsafe to autocast and banned by this region's policy; {advice}"
