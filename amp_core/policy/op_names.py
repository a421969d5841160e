"""From a public name to the aten overloads behind it, and to the nearest name when there is none."""

from __future__ import annotations

import difflib
from functools import cache
from typing import TYPE_CHECKING

import torch

from amp_core.policy.op_lists import ALIASES

if TYPE_CHECKING:
    from torch._ops import OpOverload


def aten_names(name: str) -> tuple[str, ...]:
    """The aten operations that a public name stands for: `LSTMCell` is `lstm_cell` and its fused form.

    Raises:
        ValueError: If there is no such operation, or none of its overloads is one that autocast may touch.
    """
    names = ALIASES.get(name, (name,))
    if not any(overloads_of(aten_name) for aten_name in names):
        close = difflib.get_close_matches(name, _all_names(), n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"autocast knows no out-of-place operation {name!r}{hint}")
    return names


@cache
def overloads_of(aten_name: str) -> tuple[OpOverload, ...]:
    """The overloads of an aten operation that autocast may touch: see `_is_eligible`. Empty if there are none."""
    if not aten_name.isidentifier() or aten_name.startswith("__"):
        return ()
    packet = getattr(torch.ops.aten, aten_name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):  # noqa: SLF001  (torch names its operator classes nowhere else)
        return ()
    overloads = (getattr(packet, name) for name in packet.overloads())  # type: ignore[no-untyped-call]
    return tuple(overload for overload in overloads if _is_eligible(overload))


def qualified_name(overload: OpOverload) -> str:
    """The name the dispatcher knows an overload by: `aten::softmax.int`."""
    return str(overload.name())  # type: ignore[no-untyped-call]


def _is_eligible(overload: OpOverload) -> bool:
    # In-place and out= forms have the dtype of a tensor that is there already; a required dtype argument is an explicit choice;
    # overloads without a kernel exist for TorchScript's own numbers and lists only.
    schema = overload._schema  # noqa: SLF001  (torch offers the schema under no other name)
    kinds = [str(argument.type) for argument in schema.arguments]
    return (
        torch._C._dispatch_has_kernel(qualified_name(overload))  # noqa: SLF001  (no public way to ask)
        and not schema.is_mutable
        and any("Tensor" in kind for kind in kinds)
        and not any("Dimname" in kind or kind == "Storage" for kind in kinds)
        and not any(_is_required_dtype(argument) for argument in schema.arguments)
    )


def _is_required_dtype(argument: torch._C.Argument) -> bool:
    return argument.name in {"dtype", "out_dtype"} and not str(argument.type).startswith("Optional")


@cache
def _all_names() -> list[str]:
    qualified = torch._C._dispatch_get_all_op_names()  # noqa: SLF001  (no public list)
    names = {name.removeprefix("aten::").partition(".")[0] for name in qualified if name.startswith("aten::")}
    return sorted({*ALIASES, *(name for name in names if not name.startswith("_") and not name.endswith("_"))})
