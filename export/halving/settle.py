"""Decisions that pull others along: a tensor that stays float32 keeps its module, its ties, and theirs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from export.halving.tensors import held_tensors

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from export.halving.report import TensorDecision

# Modules that read their children's weights instead of calling the children: an island must contain them whole.
READS_CHILDREN = (nn.MultiheadAttention,)


def settle(
    module: nn.Module, decisions: Sequence[TensorDecision], pinned: Collection[str] = ()
) -> tuple[list[TensorDecision], list[str]]:
    """Extend the "kept" decisions until no float32 module holds a float16 tensor and no tied tensor is both.

    Args:
        module: The module that the tensors belong to.
        decisions: One per tensor of the module, from looking at each alone.
        pinned: Names of submodules that compute in float32 whatever their tensors are.

    Returns:
        The decisions, and the outermost modules that must compute in float32, by name ("" is the module itself).
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
