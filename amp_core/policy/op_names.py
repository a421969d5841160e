"""From a public name to the dispatcher's operations behind it, and to the nearest name when there is none."""

from __future__ import annotations

import difflib
from functools import cache
from typing import TYPE_CHECKING

import torch

from amp_core.policy.op_lists import ALIASES

if TYPE_CHECKING:
    from torch._ops import OpOverload


def qualified_names(name: str) -> tuple[str, ...]:
    """The operations that a public name stands for: `LSTMCell` is `aten::lstm_cell` and its fused form.

    Args:
        name: A public name, one of aten's, or `NAMESPACE::OP`.

    Raises:
        ValueError: If there is no such operation, or none of its overloads is one that autocast may touch.
    """
    if not isinstance(name, str):
        raise ValueError(f"an operation is named by a string, such as 'softmax'; got {name!r}")  # noqa: TRY004  (one kind for all)
    names = (name,) if "::" in name else tuple(f"aten::{aten_name}" for aten_name in ALIASES.get(name, (name,)))
    existing = tuple(known for known in names if overloads_of(known))
    if not existing:
        raise ValueError(f"autocast knows no out-of-place operation {name!r}{_hint(name)}")
    return existing


def overloads_of(qualified: str) -> tuple[OpOverload, ...]:
    """The overloads of an operation that autocast may touch: see `_is_eligible`. Empty if there are none, or not yet."""
    try:
        return _existing_overloads(qualified)
    except LookupError:  # which is not cached: a custom operation may be registered later
        return ()


def qualified_name(overload: OpOverload) -> str:
    """The name the dispatcher knows an overload by: `aten::softmax.int`."""
    return str(overload.name())  # type: ignore[no-untyped-call]


def find_overload(qualified: str) -> OpOverload:
    """The overload that `qualified_name` has named."""
    namespace, _, name = qualified.partition("::")
    packet, _, overload = name.partition(".")
    found: OpOverload = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    return found


@cache
def _existing_overloads(qualified: str) -> tuple[OpOverload, ...]:
    namespace, _, name = qualified.partition("::")
    if not namespace.isidentifier() or not name.isidentifier() or name.startswith("__"):
        raise LookupError(qualified)
    packet = getattr(getattr(torch.ops, namespace), name, None)
    found: tuple[OpOverload, ...] = ()
    if isinstance(packet, torch._ops.OpOverloadPacket):  # noqa: SLF001  (torch names its operator classes nowhere else)
        overloads = (getattr(packet, name) for name in packet.overloads())  # type: ignore[no-untyped-call]
        found = tuple(overload for overload in overloads if _is_eligible(overload))
    if not found:
        raise LookupError(qualified)
    return found


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


def _hint(name: str) -> str:
    candidates = _custom_names() if "::" in name else _public_names()
    # torch.nn.functional.softmax, softmax.int, SOFTMAX
    tries = [*name.split(".")[::-1], *(part.lower() for part in name.split("."))]
    exact = [part for part in tries if part in candidates]
    close = exact or difflib.get_close_matches(name.rpartition(".")[2], candidates, n=1, cutoff=0.75 if "::" in name else 0.5)
    if close and close[0] != name:
        return f"; did you mean {close[0]!r}?"
    return "; register the custom operation before naming it" if "::" in name else ""


@cache
def _public_names() -> list[str]:
    names = {name.removeprefix("aten::").partition(".")[0] for name in _dispatched() if name.startswith("aten::")}
    public = (name for name in names if not name.startswith("_") and not name.endswith("_"))
    return sorted({*ALIASES, *(name for name in public if overloads_of(f"aten::{name}"))})


def _custom_names() -> list[str]:
    return sorted({name.partition(".")[0] for name in _dispatched()})


def _dispatched() -> list[str]:
    return list(torch._C._dispatch_get_all_op_names())  # noqa: SLF001  (no public list)
