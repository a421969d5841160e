"""Which tensors float16 can hold, and which it must not: the rules, one function each."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from export import weight_ledger
from export.errors import ExportError
from export.halving.report import Action
from export.weight_ledger import FP16_MAX, Ledger

MASK_THRESHOLD = -1e4

# Frequencies that are multiplied by a position: a relative error of 2**-11 turns into 0.5 rad at position 1000.
FREQUENCY_TABLE = re.compile(r"(^|\.|_)(inv_freqs?|inverse_frequenc(y|ies)|freqs?|frequencies|timescales?)$")


def ledger_of(tensor: Tensor) -> Ledger:
    """Count what rounding a floating tensor to float16 does to its elements."""
    values = tensor.detach()
    return weight_ledger.ledger_of((values.float() if values.dtype == torch.bfloat16 else values).numpy(force=True))


def decide(name: str, tensor: Tensor, ledger: Ledger, *, is_buffer: bool) -> tuple[Action, str]:
    """What to do with one tensor by its values and its name.

    Returns:
        The action, and the reason in a few words.

    Raises:
        ExportError: A parameter is not finite, or a buffer holds NaN: there is nothing to preserve.
    """
    if tensor.is_complex():
        return "kept", "complex numbers have no float16 form that ONNX knows"
    if not tensor.is_floating_point():
        return "untouched", f"{str(tensor.dtype).removeprefix('torch.')} holds no fractions"
    _require_usable(name, tensor, is_buffer=is_buffer)
    if is_buffer and ledger.overflow and _is_additive_mask(tensor):
        return "saturated", "an additive mask: -65504 hides as well as a number float16 cannot hold"
    reason = _reason_to_keep(name, tensor, ledger, is_buffer=is_buffer)
    if reason:
        return "kept", reason
    lossless = ledger == Ledger()
    return "halved", "within float16's range" if lossless else "some values are under float16's normal range, most are not"


def rounded(tensor: Tensor, action: Action) -> Tensor:
    """A floating tensor in float16, as the action says ("halved" or "saturated")."""
    if action == "saturated":
        return tensor.clamp(min=-FP16_MAX).masked_fill(tensor == -torch.inf, -torch.inf).half()
    return tensor.half()


def _reason_to_keep(name: str, tensor: Tensor, ledger: Ledger, *, is_buffer: bool) -> str | None:
    if ledger.overflow:
        largest = tensor.detach().abs().max().item()
        return f"{ledger.overflow} of {tensor.numel()} values over 65504 (largest {largest:.3g})"
    if ledger.flushed and ledger.flushed == _count(tensor != 0):
        return "every non-zero value is under 6e-8 and would become 0"
    if is_buffer and FREQUENCY_TABLE.search(name):
        return "a frequency table: its rounding error grows with the position"
    if is_buffer and _loses_counts(tensor):
        return "whole numbers over 2048, which float16 cannot tell apart"
    return None


def _require_usable(name: str, tensor: Tensor, *, is_buffer: bool) -> None:
    if tensor.isnan().any() or (tensor.isinf().any() and not is_buffer):
        kind = "buffer" if is_buffer else "parameter"
        raise ExportError(f"the {kind} {name!r} holds NaN or infinity; export a checkpoint from before training diverged")


def _is_additive_mask(tensor: Tensor) -> bool:
    return bool(((tensor == 0) | (tensor <= MASK_THRESHOLD)).all())


def _loses_counts(tensor: Tensor) -> bool:
    whole = tensor.isfinite().all() and (tensor == tensor.round()).all()
    return bool(whole) and bool((tensor.half().to(tensor.dtype) != tensor).any())


def _count(mask: Tensor) -> int:
    return int(mask.sum())
