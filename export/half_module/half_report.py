"""The decision about each tensor of a half module: the record that the certificate holds."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table

from halfserve.export.half_module.module_tensors import Action, Kind
from halfserve.export.half_types import WeightLedger


@dataclass(frozen=True, kw_only=True)
class TensorDecision:
    """One tensor.

    Attributes:
        name: Dotted name, as in the module's `state_dict`.
        owner: Dotted name of the submodule that holds it.
        kind: "parameter", "buffer", or "attribute" (unregistered: `.half()` skips it).
        elements: How many numbers it holds.
        action: "halved" (rounded to float16), "saturated" (a mask: numbers below float16's range became -65504), "kept" (stays
            float32, and its module with it) or "untouched" (integers, booleans).
        reason: Why, in a few words.
        ledger: Counts of what rounding does to it, also where it was kept.
    """

    name: str
    owner: str = ""
    kind: Kind = "parameter"
    elements: int
    action: Action
    reason: str
    ledger: WeightLedger

    @property
    def is_remarkable(self) -> bool:
        """Whether reports list it: it was kept, saturated, an attribute, or lost numbers."""
        if self.action == "halved":
            return self.ledger != WeightLedger() or self.kind == "attribute"
        return self.action != "untouched"


@dataclass(frozen=True, kw_only=True)
class ModuleRepair:
    """A change of the float32 model, equal in exact arithmetic, after which float16 holds it better.

    `pass_name` is "fold_batch_norm", "bake_parametrization" or "renormalise_embedding", and `nodes` are the changed submodules,
    by dotted name.
    """

    pass_name: str
    nodes: tuple[str, ...]
    text: str


@dataclass(frozen=True, kw_only=True)
class HalfReport:
    """Every decision of one conversion.

    Attributes:
        tensors: One decision for each parameter, buffer and plain tensor attribute, in the module's order.
        fp32_modules: Dotted names of the submodules that run in float32, with casts at their borders ("" is the whole model).
        fp32_reasons: The reason of each module that stays float32 for its own sake, not for a tensor in it.
        repairs: Changes before rounding.
        warnings: Overflow in training that no float32 submodule prevents.
    """

    tensors: tuple[TensorDecision, ...]
    fp32_modules: tuple[str, ...]
    fp32_reasons: tuple[tuple[str, str], ...] = ()
    repairs: tuple[ModuleRepair, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def ledger(self) -> WeightLedger:
        """The counts of all tensors that were rounded."""
        rounded = (tensor.ledger for tensor in self.tensors if tensor.action in ("halved", "saturated"))
        return sum(rounded, WeightLedger())

    @property
    def actions(self) -> dict[str, int]:
        """How many tensors met each action."""
        return dict(Counter(tensor.action for tensor in self.tensors))

    def to_json(self) -> dict[str, Any]:
        """Return the report in JSON's own types; only remarkable tensors are listed, so that a certificate stays small."""
        return {
            "actions": self.actions,
            "ledger": asdict(self.ledger),
            "fp32_modules": list(self.fp32_modules),
            "fp32_reasons": dict(self.fp32_reasons),
            "repairs": [{**asdict(repair), "nodes": list(repair.nodes)} for repair in self.repairs],
            "warnings": list(self.warnings),
            "tensors": [asdict(tensor) for tensor in self.tensors if tensor.is_remarkable],
        }


def half_table(report: HalfReport, *, limit: int = 40) -> Table:
    """Return a row for each warning, repair, float32 module and remarkable tensor, at most `limit`; the title counts all
    tensors.
    """
    counts = ", ".join(f"{count} {action}" for action, count in sorted(report.actions.items())) or "none"
    table = Table(title=f"tensors: {counts}", box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("name, and why", overflow="fold")
    table.add_column("elements", justify="right", no_wrap=True)
    table.add_column("action", no_wrap=True)
    rows = [("", "", "warning", warning) for warning in report.warnings]  # first, since large models exceed the limit
    rows += [(", ".join(repair.nodes), "", "repaired", repair.text) for repair in report.repairs]
    rows += [(name or "(model)", "", "kept", reason) for name, reason in report.fp32_reasons]
    rows += [
        (tensor.name, f"{tensor.elements:,}", tensor.action, _why(tensor)) for tensor in report.tensors if tensor.is_remarkable
    ]
    for name, elements, action, why in rows[:limit]:
        story = "\n  ".join(part for part in (name, why) if part)
        table.add_row(story, elements, action, style={"kept": "yellow", "warning": "red"}.get(action))
    if len(rows) > limit:
        table.caption = f"{len(rows) - limit} rows more"
    return table


def _why(tensor: TensorDecision) -> str:
    ledger = tensor.ledger
    counts = [(ledger.overflow, "over 65504"), (ledger.flushed, "flushed to 0"), (ledger.subnormal, "subnormal")]
    losses = ", ".join(f"{count:,} {what}" for count, what in counts if count)
    return f"{tensor.reason} ({losses})" if losses else tensor.reason
