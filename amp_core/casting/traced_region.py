"""A region with a policy, in a form that torch.compile can trace into one graph.

Two calls in the graph put the policy in force and take it back. They act while the graph's operations are traced further, where
the policy's kernels then insert its casts; nothing of them is left in the compiled code. Since the policy's text is part of the
graph, no cache can take one policy's code for another's.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from amp_core.casting.policy_state import Saved, restore
from amp_core.casting.region import enforce
from amp_core.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Entered(threading.local):
    def __init__(self) -> None:
        self.saved: list[Saved | None] = []


_entered = _Entered()


@contextmanager
def traced_region(
    device_type: str, dtype: torch.dtype | None, enabled: bool, cache_enabled: bool | None, policy: str
) -> Iterator[None]:
    """A region of torch's own, with a policy in force.

    Args:
        device_type: As of `autocast`, as are the others.
        dtype: See there.
        enabled: See there.
        cache_enabled: See there.
        policy: Its string form.
    """
    with torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled):
        _enter_policy(policy, device_type)
        try:
            yield
        finally:
            _exit_policy()


def _enter_policy(policy: str, device_type: str) -> None:
    _entered.saved.append(enforce(Policy.parse(policy), device_type))


def _exit_policy() -> None:
    saved = _entered.saved.pop()
    if saved is not None:
        restore(saved)


def _unwind(*_: object) -> None:
    while _entered.saved:
        _exit_policy()


def prepare() -> None:
    """Get Dynamo, which is tracing, ready for a region.

    It shall put the two calls into its graphs as they are, leave them there though nothing uses what they return, and take a
    policy back when it gives up in the middle of a region, as it does to trace a function again in another way.
    """
    for function in (_enter_policy, _exit_policy):
        torch.compiler.allow_in_graph(function)  # type: ignore[no-untyped-call]
        torch.fx.node.has_side_effect(function)
    from torch._dynamo.callback import callback_handler  # noqa: PLC0415  (only where it is loaded already)
    from torch._dynamo.symbolic_convert import InstructionTranslator  # noqa: PLC0415  (see above)

    InstructionTranslator.current_tx().output.add_cleanup_hook(_unwind)
    if _unwind not in callback_handler.end_callbacks:
        callback_handler.register_end_callback(_unwind)


def _type_of_regions(_: object) -> type:
    return torch.autocast


def may_have_a_policy() -> bool:
    """Whether what Dynamo is tracing can keep a policy, which torch.export cannot.

    It also tells Dynamo of which type torch.autocast's objects are: torch 2.11's asks when `__new__` makes one, and gives up.
    """
    from torch._dynamo.variables.ctx_manager import AutocastModeVariable  # noqa: PLC0415  (only where it is loaded already)

    if "python_type" not in vars(AutocastModeVariable):
        AutocastModeVariable.python_type = _type_of_regions  # type: ignore[assignment,method-assign]  # (mypy reads it as bound)
    return not torch.compiler.is_exporting()


# What torch.compiler.assume_constant_result does, without its loading Dynamo: a call runs as it is while Dynamo traces. Traced,
# torch 2.11's is_exporting says yes to torch.compile too.
prepare._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001  (see above)
may_have_a_policy._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001  (see above)
