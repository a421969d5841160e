"""A float32 module in float16 or bfloat16, except for what that type cannot hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from rich.table import Table
from torch import nn

from halfserve.amp_core.policy import Policy
from halfserve.amp_core.recorder import Record
from halfserve.export.export_errors import ExportError
from halfserve.export.half_module.fp32_modules import make_island, overflowing_modules, pinned_modules
from halfserve.export.half_module.half_report import HalfReport, TensorDecision, half_table
from halfserve.export.half_module.module_tensors import HeldTensor, decide, detached_copy, held_tensors, ledger_of, rounded
from halfserve.export.half_module.repairs import bake, fold_batch_norm
from halfserve.export.half_types import HalfName, HalfType, WeightLedger, half_named
from halfserve.export.to_onnx.forward_call import require_python


@dataclass(frozen=True, kw_only=True)
class HalfResult:
    """A converted copy of a module, in evaluation mode, and its report; `rich.print` shows the report as a table.

    Floating inputs are expected in the half type, and outputs have it.
    """

    module: nn.Module
    report: HalfReport

    def __rich__(self) -> Table:
        return half_table(self.report)


def to_half(
    module: nn.Module,
    *,
    policy: Policy | None = None,
    keep_fp32: Sequence[str] = (),
    record: Record | None = None,
    dtype: HalfName = "float16",
) -> HalfResult:
    """Round a module's tensors to float16, or to bfloat16, where that is safe; the given module stays as it is.

    First the copy is repaired, in ways that change nothing in exact arithmetic: parametrized and normalised weights are
    computed, the `max_norm` of embeddings is applied, and a BatchNorm that follows a convolution is folded into it in float64.

    A tensor that must not be rounded stays float32, and the submodule that owns it computes in float32 with casts at its border
    (see `make_island`): tensors with values over 65504 (a BatchNorm's variance, a scale), frequency tables of rotary
    embeddings, counters over 2048, complex buffers, tensors that would vanish, and submodules that the policy, the training
    record or the model itself name. Integers and booleans are left alone, and an additive mask's huge negative numbers
    become -65504. Unregistered tensors in attributes, which `.half()` skips, are treated like buffers.

    bfloat16 has float32's range: nothing is too large for it or vanishes, and the record keeps nothing. Counters over 256 and
    frequency tables stay float32.

    Args:
        module: A module whose floating tensors are float32 (float64 and bfloat16 are rounded too).
        policy: The autocast policy of the training run: submodules whose operation it adds to float32 stay float32.
        keep_fp32: Names of tensors or submodules to keep, as shell patterns: `"encoder.norm*"`, `"head.bias"`.
        record: The record of the training run: submodules with numbers over 65504 stay float32.
        dtype: The type to round to, "float16" or "bfloat16".

    Raises:
        ExportError: A pattern matches nothing; a parameter is not finite, or of a class whose numbers cannot be read, as of
            quantized weights; the module is lazy; the record is of another model; or a tensor that belongs to the outermost
            module itself must stay float32, which would leave nothing to convert; a part is a TorchScript module.
        UsageError: `dtype` is another type.
    """
    target = half_named(dtype)
    require_python(module)
    _require_matches(module, keep_fp32)
    half = detached_copy(module).eval()
    repairs = bake(half)
    recorded, warnings = ({}, []) if target.has_float32_range else overflowing_modules(half, record)
    pinned = {**recorded, **pinned_modules(half, policy), **_kept_modules(half, keep_fp32)}
    repairs += fold_batch_norm(half, lambda name: not _is_inside(name, pinned) and not _matching(name, keep_fp32), target)
    tensors = held_tensors(half)
    first = [_decision(held, keep_fp32, target) for held in tensors]
    decisions, islands = settle(half, first, pinned)
    _require_something_left(decisions, islands, keep_fp32)
    _apply(tensors, decisions, target)
    for island in {id(part): part for part in map(half.get_submodule, islands)}.values():
        make_island(island, target)
    report = HalfReport(
        tensors=tuple(decisions),
        fp32_modules=tuple(islands),
        fp32_reasons=tuple(sorted(pinned.items())),
        repairs=tuple(repairs),
        warnings=tuple(warnings),
    )
    return HalfResult(module=half, report=report)


def _ledger(held: HeldTensor, half: HalfType) -> WeightLedger:
    try:
        return ledger_of(held.tensor, half)
    except RuntimeError as error:  # a class of its own, such as a weight that torchao has quantized
        kind = type(held.tensor).__name__
        raise ExportError(
            f"the {held.kind} {held.name!r} is of class {kind}, whose numbers cannot be read; "
            "give the float32 model, from before its weights were quantized or distributed"
        ) from error


def _decision(held: HeldTensor, keep_fp32: Sequence[str], half: HalfType) -> TensorDecision:
    tensor = held.tensor
    ledger = _ledger(held, half) if tensor.is_floating_point() else WeightLedger()
    action, reason = decide(held.name, tensor, ledger, is_buffer=held.kind != "parameter", half=half)
    pattern = _matching(held.name, keep_fp32)
    if pattern and action in ("halved", "saturated"):
        action, reason = "kept", f"keep_fp32 {pattern!r}"
    if held.kind == "attribute":
        reason = f"a plain attribute, no buffer: {reason}"
    return TensorDecision(
        name=held.name,
        owner=held.owner,
        kind=held.kind,
        elements=tensor.numel(),
        action=action,
        reason=reason,
        ledger=ledger,
    )


def _matching(name: str, patterns: Sequence[str]) -> str | None:
    parents = [name.rsplit(".", depth)[0] for depth in range(name.count(".") + 1)]
    return next((pattern for pattern in patterns if any(fnmatchcase(part, pattern) for part in parents)), None)


def _is_inside(name: str, modules: Mapping[str, str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _kept_modules(module: nn.Module, patterns: Sequence[str]) -> dict[str, str]:
    """Submodules without tensors that match: an activation, a softmax."""
    names = [name for name, part in module.named_modules(remove_duplicate=False) if name and not any(part.state_dict())]
    return {name: f"keep_fp32 {pattern!r}" for name in names if (pattern := _matching(name, patterns))}


def _require_matches(module: nn.Module, patterns: Sequence[str]) -> None:
    names = [held.name for held in held_tensors(module)]
    submodules = [name for name, _ in module.named_modules(remove_duplicate=False) if name]
    for pattern in patterns:
        if not any(_matching(name, [pattern]) for name in (*names, *submodules)):
            raise ExportError(f"keep_fp32 {pattern!r} matches no parameter, buffer or submodule; names look like {names[:3]}")


def _require_something_left(decisions: Sequence[TensorDecision], islands: list[str], keep_fp32: Sequence[str]) -> None:
    if islands != [""]:
        return
    culprit = next(d for d in decisions if d.action == "kept" and not d.owner)
    alone = all(not d.owner for d in decisions)
    if not alone and not _matching(culprit.name, keep_fp32):
        raise ExportError(
            f"{culprit.name!r} must stay float32 ({culprit.reason}) and belongs to the outermost module, which would keep the "
            "whole model float32; move it into a submodule of its own, with the computation that uses it"
        )


def _apply(tensors: Sequence[HeldTensor], decisions: Sequence[TensorDecision], half: HalfType) -> None:
    # Written through `.data`, so that tied tensors stay one tensor.
    for held, decision in zip(tensors, decisions, strict=True):
        tensor = held.tensor
        if decision.action in ("halved", "saturated"):
            tensor.data = rounded(tensor.data, decision.action, half)
        elif decision.action == "kept" and tensor.is_floating_point():
            tensor.data = tensor.data.float()


# These read their children's weights without calling the children: an island must contain them whole.
READS_CHILDREN = (nn.MultiheadAttention,)


def settle(
    module: nn.Module, decisions: Sequence[TensorDecision], pinned: Collection[str] = ()
) -> tuple[list[TensorDecision], list[str]]:
    """Extend the "kept" decisions until no float32 module holds a half tensor and no tied tensor is both.

    `pinned` names the submodules that compute in float32 for their own sake. The result are the decisions, and the names of the
    outermost modules that must compute in float32 ("" is the module itself).
    """
    ties = _ties(module)
    while True:
        owners = {decision.owner for decision in decisions if decision.action == "kept"}
        islands = _outermost({_callable_part(module, name) for name in owners.union(pinned)})
        kept = {decision.name for decision in decisions if decision.action == "kept"}
        settled = [_pulled(decision, islands, ties.get(decision.name, set()) & kept) for decision in decisions]
        if settled == list(decisions):
            return settled, islands
        decisions = settled


def _pulled(decision: TensorDecision, islands: list[str], kept_ties: set[str]) -> TensorDecision:
    if decision.action not in ("halved", "saturated"):
        return decision
    if kept_ties:
        return replace(decision, action="kept", reason=f"tied to {min(kept_ties)!r}, which stays float32")
    island = next((name for name in islands if _contains(name, decision.name)), None)
    if island is None:
        return decision
    return replace(decision, action="kept", reason=f"part of {island or 'the model'}, which computes in float32")


def _callable_part(root: nn.Module, name: str) -> str:
    while name and isinstance(root.get_submodule(name.rpartition(".")[0]), READS_CHILDREN):
        name = name.rpartition(".")[0]
    return name


def _outermost(islands: set[str]) -> list[str]:
    return [name for name in sorted(islands) if not any(_contains(other, name) for other in islands - {name})]


def _contains(island: str, name: str) -> bool:
    return not island or name.startswith(f"{island}.")


def _ties(module: nn.Module) -> dict[str, set[str]]:
    names = defaultdict(set)
    tensors = held_tensors(module)
    for held in tensors:
        names[id(held.tensor)].add(held.name)
    return {held.name: names[id(held.tensor)] for held in tensors}
