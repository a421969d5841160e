"""The kernel that a policy puts in an operation's place at the dispatcher's autocast key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from amp_core.casting.pause_compile import REFUSAL
from amp_core.casting.rules_in_force import rules_in_force
from amp_core.policy import Rule, op_lists
from amp_core.policy.native_rules import autocast_key
from amp_core.policy.op_names import qualified_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch._ops import OpOverload


def make_kernel(overload: OpOverload, device_type: str, native: Any) -> Callable[..., Any]:
    """The kernel of one overload: torch's own behaviour unless this thread's rules say otherwise.

    Args:
        overload: The operation.
        device_type: The device whose autocast key the kernel is for.
        native: torch's own kernel at that key, None where there is none.
    """
    key = getattr(torch._C.DispatchKey, autocast_key(device_type))  # noqa: SLF001  (dispatch keys have no public face)
    autocast_only, below = torch._C.DispatchKeySet(key), torch._C._dispatch_keyset_full_after(key)  # noqa: SLF001  (see above)
    name = qualified_name(overload)
    dtype_position = _dtype_position(overload)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        rule = rules_in_force(device_type).get(name)
        if rule is None and native is not None:
            return native.call_boxed(keyset, *args, **kwargs)
        if rule is None:
            # Not the exclusion below: the parts of a composite operation must still be autocast.
            return overload.redispatch(keyset & below, *args, **kwargs)
        if rule is Rule.BAN:
            raise RuntimeError(_ban_text(name))
        _refuse_under_compile()
        with torch._C._ExcludeDispatchKeyGuard(autocast_only):  # noqa: SLF001  (no public form; torch's own casts use it)
            if dtype_position is not None and _has_dtype(args, kwargs, dtype_position):
                return overload(*args, **kwargs)
            dtype = _target_dtype(rule, device_type, (args, *kwargs.values()))
            cast_kwargs = {key: _cast(value, device_type, dtype) for key, value in kwargs.items()}
            return overload(*_cast(args, device_type, dtype), **cast_kwargs)

    return kernel


def _dtype_position(overload: OpOverload) -> int | None:
    names = [argument.name for argument in overload._schema.arguments]  # noqa: SLF001  (torch offers the schema under no other name)
    return names.index("dtype") if "dtype" in names else None


def _has_dtype(args: tuple[Any, ...], kwargs: dict[str, Any], position: int) -> bool:
    return kwargs.get("dtype") is not None or (len(args) > position and args[position] is not None)


def _target_dtype(rule: Rule, device_type: str, values: Any) -> torch.dtype:
    if rule is Rule.LOW:
        return torch.get_autocast_dtype(device_type)
    if rule is Rule.FP32:
        return torch.float32
    dtypes = {tensor.dtype for tensor in _eligible_tensors(values, device_type)}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def _is_eligible(value: Any, device_type: str) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype is not torch.float64
        and value.device.type == device_type
    )


def _eligible_tensors(value: Any, device_type: str) -> Iterator[torch.Tensor]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _eligible_tensors(item, device_type)
    elif _is_eligible(value, device_type):
        yield value


def _cast(value: Any, device_type: str, dtype: torch.dtype) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)([_cast(item, device_type, dtype) for item in value])
    return value.to(dtype) if _is_eligible(value, device_type) and value.dtype is not dtype else value


def _ban_text(name: str) -> str:
    op = name.removeprefix("aten::").partition(".")[0]
    instead = op_lists.INSTEAD_OF.get(op)
    advice = f"use {instead}" if instead else "leave it out, or run it in an inner region with enabled=False"
    return f"{op} is unsafe to autocast and banned by this region's policy; {advice}"


def _refuse_under_compile() -> None:
    # Reached only if a function is compiled for the first time inside the region; see pause_compile.
    if torch._guards.TracingContext.try_get() is not None:  # noqa: SLF001  (torch.compiler's own questions miss this stage)
        raise RuntimeError(REFUSAL)
