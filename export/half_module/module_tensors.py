"""The tensors of a module, and which of them half precision can hold."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from halfserve.export.export_errors import ExportError
from halfserve.export.half_types import FP16, HalfType, WeightLedger
from halfserve.export.half_types import ledger_of as ledger_of_array

Kind = Literal["parameter", "buffer", "attribute"]
Action = Literal["halved", "saturated", "kept", "untouched"]

MASK_THRESHOLD = -1e4
# Frequencies that are multiplied by a position: a relative error of 2**-11 turns into 0.5 rad at position 1000.
FREQUENCY_TABLE = re.compile(r"(^|\.|_)(inv_freqs?|inverse_frequenc(y|ies)|freqs?|frequencies|timescales?)$")


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldTensor:
    """A tensor in a module.

    Its dotted name is `block.tables.0` for the first tensor of the list `block.tables`, and `owner` that of the submodule that
    holds it. An attribute is assigned without registration, so that `.half()` skips it.
    """

    name: str
    owner: str
    kind: Kind
    tensor: Tensor


def held_tensors(module: nn.Module) -> list[HeldTensor]:
    """Return all tensors of a module, tied ones once for each name; attributes come last.

    Raises:
        ExportError: A lazy module has no sizes before its first input.
    """
    found: list[HeldTensor] = []
    for owner, part in module.named_modules(remove_duplicate=False):
        found += [_registered(owner, name, p, "parameter") for name, p in part._parameters.items() if p is not None]  # noqa: SLF001  (named_parameters walks the whole tree each time)
        found += [_registered(owner, name, b, "buffer") for name, b in part._buffers.items() if b is not None]  # noqa: SLF001  (see above)
    known = {id(held.tensor) for held in found}
    for owner, part in module.named_modules(remove_duplicate=False):
        for name, tensor in _plain(part):
            if id(tensor) not in known:
                found.append(HeldTensor(name=_joined(owner, name), owner=owner, kind="attribute", tensor=tensor))
    return found


def detached_copy(module: nn.Module) -> nn.Module:
    """Return a copy of a module; attributes from earlier computations lose their autograd history, which cannot be copied."""
    attributes = [tensor for part in module.modules() for _, tensor in _plain(part)]
    memo: dict[int, Any] = {id(tensor): tensor.detach().clone() for tensor in attributes if tensor.grad_fn is not None}
    return copy.deepcopy(module, memo)


def _registered(owner: str, name: str, tensor: Tensor, kind: Kind) -> HeldTensor:
    if is_lazy(tensor):
        raise ExportError(f"{_joined(owner, name)!r} has no size yet (a lazy module); run the model once on an example first")
    return HeldTensor(name=_joined(owner, name), owner=owner, kind=kind, tensor=tensor)


def _plain(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, value in vars(part).items():
        if name not in ("_parameters", "_buffers", "_modules"):
            yield from _in_value(name, value)


def _in_value(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            yield from _in_value(f"{name}.{index}", item)
    elif type(value) is dict:
        for key, item in value.items():
            yield from _in_value(f"{name}.{key}", item)


def _joined(owner: str, name: str) -> str:
    return f"{owner}.{name}" if owner else name


def ledger_of(tensor: Tensor, half: HalfType = FP16) -> WeightLedger:
    """Count what rounding a floating torch tensor does to its elements."""
    values = tensor.detach()
    return ledger_of_array((values.float() if values.dtype == torch.bfloat16 else values).numpy(force=True), half)


def decide(name: str, tensor: Tensor, ledger: WeightLedger, *, is_buffer: bool, half: HalfType = FP16) -> tuple[Action, str]:
    """Return the action for one tensor by its values and its name, and the reason in a few words.

    Raises:
        ExportError: A parameter is not finite, or a buffer holds NaN.
    """
    if tensor.is_complex():
        return "kept", f"complex numbers have no {half.name} form that ONNX knows"
    if not tensor.is_floating_point():
        return "untouched", f"{str(tensor.dtype).removeprefix('torch.')} holds no fractions"
    _require_usable(name, tensor, is_buffer=is_buffer)
    if is_buffer and ledger.overflow and _is_additive_mask(tensor):
        return "saturated", f"an additive mask: {-half.largest:g} hides as well as a number {half.name} cannot hold"
    reason = _reason_to_keep(name, tensor, ledger, half, is_buffer=is_buffer)
    if reason:
        return "kept", reason
    lossless = ledger == WeightLedger()
    return (
        "halved",
        f"within {half.name}'s range" if lossless else f"some values are under {half.name}'s normal range, most are not",
    )


def rounded(tensor: Tensor, action: Action, half: HalfType = FP16) -> Tensor:
    """Return a floating tensor in the half type, as the action says ("halved" or "saturated")."""
    if action == "saturated":
        tensor = tensor.clamp(min=-half.largest).masked_fill(tensor == -torch.inf, -torch.inf)
    return tensor.to(torch_dtype(half))


def torch_dtype(half: HalfType) -> torch.dtype:
    return torch.float16 if half is FP16 else torch.bfloat16


def _reason_to_keep(name: str, tensor: Tensor, ledger: WeightLedger, half: HalfType, *, is_buffer: bool) -> str | None:
    if ledger.overflow:
        largest = tensor.detach().abs().max().item()
        return f"{ledger.overflow} of {tensor.numel()} values over {half.largest:g} (largest {largest:.3g})"
    if ledger.flushed and ledger.flushed == int((tensor != 0).sum()):
        return f"every non-zero value is under {half.smallest_subnormal:.0g} and would become 0"
    if is_buffer and FREQUENCY_TABLE.search(name):
        return "a frequency table: its rounding error grows with the position"
    if is_buffer and _loses_counts(tensor, half):
        return f"whole numbers over {half.whole_numbers}, which {half.name} cannot tell apart"
    return None


def _require_usable(name: str, tensor: Tensor, *, is_buffer: bool) -> None:
    if tensor.isnan().any() or (tensor.isinf().any() and not is_buffer):
        kind = "buffer" if is_buffer else "parameter"
        raise ExportError(f"the {kind} {name!r} holds NaN or infinity; export a checkpoint from before training diverged")


def _is_additive_mask(tensor: Tensor) -> bool:
    return bool(((tensor == 0) | (tensor <= MASK_THRESHOLD)).all())


def _loses_counts(tensor: Tensor, half: HalfType) -> bool:
    whole = tensor.isfinite().all() and (tensor == tensor.round()).all()
    return bool(whole) and bool((tensor.to(torch_dtype(half)).to(tensor.dtype) != tensor).any())
