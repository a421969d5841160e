"""Decorators for `forward` and `backward` of custom autograd functions, so that backward runs under its forward's autocast."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

import torch

from amp_core.casting.autocast import autocast
from amp_core.casting.policy_state import policies_in_force
from amp_core.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Callable

Function = TypeVar("Function", bound="Callable[..., Any]")


class _Decorator(Protocol):
    def __call__(self, function: Function, /) -> Function: ...


# What torch's own pair leaves on the context object, and what we add to it.
_POLICY = "_halfserve_policy"


@overload
def custom_fwd(forward: None = None, *, device_type: str, cast_inputs: torch.dtype | None = None) -> _Decorator: ...
@overload
def custom_fwd(forward: Function, *, device_type: str, cast_inputs: torch.dtype | None = None) -> Function: ...
def custom_fwd(forward: Any = None, *, device_type: str, cast_inputs: torch.dtype | None = None) -> Any:
    """Decorate `forward` of a `torch.autograd.Function`; see `torch.amp.custom_fwd`, whose meaning this keeps.

    Args:
        forward: The static method; leave it out to use this with arguments above a `def`.
        device_type: The device whose autocast matters.
        cast_inputs: In an enabled region, cast floating inputs to this dtype and run `forward` with autocast disabled.

    Raises:
        ValueError: If `device_type` is not a string.
    """
    if forward is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)
    by_torch = torch.amp.custom_fwd(forward, device_type=device_type, cast_inputs=cast_inputs)

    @functools.wraps(forward)
    def wrapper(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        setattr(ctx, _POLICY, policies_in_force().of(device_type))
        return by_torch(ctx, *args, **kwargs)

    return wrapper


@overload
def custom_bwd(backward: None = None, *, device_type: str) -> _Decorator: ...
@overload
def custom_bwd(backward: Function, *, device_type: str) -> Function: ...
def custom_bwd(backward: Any = None, *, device_type: str) -> Any:
    """Decorate `backward` of a `torch.autograd.Function` whose `forward` has `custom_fwd`.

    Backward then runs with forward's dtype, its being enabled or not, and its policy, also in another thread.

    Raises:
        RuntimeError: When backward runs, if forward has no `custom_fwd`.
    """
    if backward is None:
        return functools.partial(custom_bwd, device_type=device_type)

    @functools.wraps(backward)
    def wrapper(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(ctx, "_fwd_used_autocast"):
            raise RuntimeError("a backward with custom_bwd needs custom_fwd on its forward(ctx, ...), which notes its autocast")
        enabled, dtype = ctx._fwd_used_autocast, ctx._dtype  # noqa: SLF001  (torch's custom_fwd puts them there)
        # torch's custom_fwd notes no policy: there is none in the regions that it knows.
        with autocast(device_type, dtype=dtype, enabled=enabled, policy=getattr(ctx, _POLICY, Policy())):
            return backward(ctx, *args, **kwargs)

    return wrapper
