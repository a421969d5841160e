"""Runs an operation from within a dispatch mode as it would have run without the mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from amp_core.casting.policy_state import KEY as POLICY_KEY
from amp_core.casting.policy_state import NO_POLICIES, policies_in_force
from amp_core.policy.native_rules import autocast_key
from amp_core.policy.op_names import qualified_name

_C = torch._C  # noqa: SLF001  (dispatch keys have no public face)


def run(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation with autocast as its kernel would have found it.

    Torch turns autocast off for whatever a mode calls. Most kernels do not notice, since they compute by themselves. What
    autocast has no rule for (a user's own operation, an encoder layer in one call) runs its parts under the autocast of the
    region that it was called in, and does so here.
    """
    if isinstance(op, OpOverload):
        device: str | None = next((value.device.type for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if device is not None and _was_in_region(device) and not _has_rule(op, device):
            with _autocast_on(device):
                return op(*args, **kwargs)
    return op(*args, **kwargs)


def _was_in_region(device: str) -> bool:
    """Whether autocast was on where the user's code called the operation, or what it is part of."""
    with _C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]  # noqa: SLF001  (dispatch keys have no public face)
        return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def _has_rule(op: OpOverload, device: str) -> bool:
    """Whether autocast or a policy has a rule for the operation: its parts then run with autocast off."""
    rules = (rules for of, rules in policies_in_force().rules if of == device)
    return _is_listed(op, device) or any(qualified_name(op) in of_device for of_device in rules)


@cache
def _is_listed(op: OpOverload, device: str) -> bool:
    return _C._dispatch_has_kernel_for_dispatch_key(qualified_name(op), autocast_key(device))  # noqa: SLF001  (see above)


@contextmanager
def _autocast_on(device: str) -> Iterator[None]:
    included = _C._dispatch_tls_local_include_set()  # noqa: SLF001  (dispatch keys have no public face)
    excluded = _C._dispatch_tls_local_exclude_set()  # noqa: SLF001  (dispatch keys have no public face)
    excluded = excluded.remove(getattr(_C.DispatchKey, autocast_key(device)))
    if policies_in_force() is not NO_POLICIES:
        excluded = excluded.remove(POLICY_KEY)
    with _C._ForceDispatchKeyGuard(included, excluded):  # noqa: SLF001  (dispatch keys have no public face)
        yield
