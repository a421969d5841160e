"""A float32 module in float16, except for what float16 cannot hold."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from export.errors import ExportError
from export.halving.fp32_island import make_island
from export.halving.pinned import pinned_modules
from export.halving.report import HalfReport, TensorDecision
from export.halving.rules import decide, ledger_of, rounded
from export.halving.settle import settle
from export.weight_ledger import Ledger

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn

    from amp_core.policy import Policy


@dataclass(frozen=True, kw_only=True)
class HalfResult:
    """A converted module and the record of how.

    Attributes:
        module: A copy, in evaluation mode; floating inputs are expected in float16, outputs are float16.
        report: One decision per tensor.
    """

    module: nn.Module
    report: HalfReport


def to_half(module: nn.Module, *, policy: Policy | None = None, keep_fp32: Sequence[str] = ()) -> HalfResult:
    """Round a module's parameters and buffers to float16 where that is safe; the given module stays as it is.

    What must not be rounded stays float32, and the submodule that owns it computes in float32 with casts at its border (see
    `export.halving.fp32_island`): tensors with values over 65504 (a BatchNorm's variance, a scale), frequency tables of rotary
    embeddings, counters over 2048, complex buffers, tensors that would vanish. Integer and boolean buffers are left alone, and
    an additive mask's huge negative numbers become -65504.

    Args:
        module: A module whose floating tensors are float32 (float64 and bfloat16 are rounded too).
        policy: The autocast policy of the training run: submodules whose operation it adds to float32 stay float32.
        keep_fp32: Names of tensors or submodules to keep, as shell patterns: `"encoder.norm*"`, `"head.bias"`.

    Raises:
        ExportError: A pattern matches nothing; a parameter is not finite; or a tensor that belongs to the outermost module
            itself must stay float32, which would leave nothing to convert.
    """
    _require_matches(module, keep_fp32)
    half = copy.deepcopy(module).eval()
    first = [_decision(name, tensor, keep_fp32, is_buffer=b) for name, tensor, b in _tensors(half)]
    decisions, islands = settle(half, first, pinned_modules(half, policy))
    _require_something_left(decisions, islands, keep_fp32)
    _apply(half, {decision.name: decision for decision in decisions})
    for island in islands:
        make_island(half.get_submodule(island))
    return HalfResult(module=half, report=HalfReport(tensors=tuple(decisions), fp32_modules=tuple(islands)))


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield name, parameter, False
    for name, buffer in module.named_buffers(remove_duplicate=False):
        yield name, buffer, True


def _decision(name: str, tensor: Tensor, keep_fp32: Sequence[str], *, is_buffer: bool) -> TensorDecision:
    ledger = ledger_of(tensor) if tensor.is_floating_point() else Ledger()
    action, reason = decide(name, tensor, ledger, is_buffer=is_buffer)
    pattern = _matching(name, keep_fp32)
    if pattern and action in ("halved", "saturated"):
        action, reason = "kept", f"keep_fp32 {pattern!r}"
    return TensorDecision(name=name, elements=tensor.numel(), action=action, reason=reason, ledger=ledger)


def _matching(name: str, patterns: Sequence[str]) -> str | None:
    parents = [name.rsplit(".", depth)[0] for depth in range(name.count(".") + 1)]
    return next((pattern for pattern in patterns if any(fnmatchcase(part, pattern) for part in parents)), None)


def _require_matches(module: nn.Module, patterns: Sequence[str]) -> None:
    names = [name for name, _, _ in _tensors(module)]
    for pattern in patterns:
        if not any(_matching(name, [pattern]) for name in names):
            raise ExportError(f"keep_fp32 {pattern!r} matches no parameter, buffer or submodule; names look like {names[:3]}")


def _require_something_left(decisions: list[TensorDecision], islands: list[str], keep_fp32: Sequence[str]) -> None:
    if islands != [""]:
        return
    culprit = next(d for d in decisions if d.action == "kept" and "." not in d.name)
    alone = all("." not in d.name for d in decisions)
    if not alone and not _matching(culprit.name, keep_fp32):
        raise ExportError(
            f"{culprit.name!r} must stay float32 ({culprit.reason}) and belongs to the outermost module, which would keep the "
            "whole model float32; move it into a submodule of its own, with the computation that uses it"
        )


def _apply(module: nn.Module, decisions: dict[str, TensorDecision]) -> None:
    # Written through `.data`, so that tied tensors stay one tensor.
    for name, tensor, _ in _tensors(module):
        decision = decisions[name]
        if decision.action in ("halved", "saturated"):
            tensor.data = rounded(tensor.data, decision.action)
        elif decision.action == "kept" and tensor.is_floating_point():
            tensor.data = tensor.data.float()
