"""Lets torch's activation checkpointing recompute under the policies of the forward pass.

`torch.utils.checkpoint` notes the autocast state of the tensors' device and of the CPU, and restores it when it computes the
activations again during backward. Policies live in the state of other devices, and it offers no hook; without this, an
activation would be computed again under other rules, silently so in its reentrant form. So the two places that receive the
user's function get it wrapped, from the first region with a policy on.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

from torch.utils import checkpoint

from amp_core.casting.policy_state import policies_in_force, put_in_force, restore

if TYPE_CHECKING:
    from collections.abc import Callable

_lock = threading.Lock()
_is_done = False


def recompute_under_policies() -> None:
    """Have checkpointed functions take the policies in force along, unless they do already."""
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
    policies = policies_in_force()  # none in force is as good as any: backward may run in a region that has one

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
