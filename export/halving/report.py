"""What `to_half` did to each tensor, and why: the record that travels in the certificate."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Literal

from export.halving.tensors import Kind
from export.weight_ledger import Ledger

Action = Literal["halved", "saturated", "kept", "untouched"]


@dataclass(frozen=True, kw_only=True)
class TensorDecision:
    """One tensor.

    Attributes:
        name: Dotted name, as in the module's `state_dict`.
        owner: Dotted name of the submodule that holds it.
        kind: "parameter", "buffer", or "attribute": one that was only assigned, and that `.half()` would have passed over.
        elements: How many numbers it holds.
        action: "halved" (rounded to float16), "saturated" (a mask: what is below float16's range became its most negative
            number), "kept" (stays float32, and its module with it) or "untouched" (integers, booleans).
        reason: Why, in a few words.
        ledger: What rounding it did, or would have done where it was kept.
    """

    name: str
    owner: str = ""
    kind: Kind = "parameter"
    elements: int
    action: Action
    reason: str
    ledger: Ledger

    @property
    def is_remarkable(self) -> bool:
        """Whether people should see it: what was not simply rounded without any loss of range."""
        if self.action == "halved":
            return self.ledger != Ledger() or self.kind == "attribute"
        return self.action != "untouched"


@dataclass(frozen=True, kw_only=True)
class Repair:
    """A change of the float32 model, equal in exact arithmetic, after which float16 holds it better.

    Attributes:
        pass_name: What was done: "fold_batch_norm", "bake_parametrization", "renormalise_embedding".
        nodes: Dotted names of the submodules that it concerned.
        text: The same for people.
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
        fp32_reasons: For those of them that were asked for as modules: why.
        repairs: What was changed before rounding.
        warnings: What could not be helped.
    """

    tensors: tuple[TensorDecision, ...]
    fp32_modules: tuple[str, ...]
    fp32_reasons: tuple[tuple[str, str], ...] = ()
    repairs: tuple[Repair, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def ledger(self) -> Ledger:
        """The counts of all tensors that were rounded."""
        rounded = (tensor.ledger for tensor in self.tensors if tensor.action in ("halved", "saturated"))
        return sum(rounded, Ledger())

    @property
    def actions(self) -> dict[str, int]:
        """How many tensors met each action."""
        return dict(Counter(tensor.action for tensor in self.tensors))

    def to_json(self) -> dict[str, Any]:
        """The report as JSON's own types: totals, and tensors one by one where there is something to say about them.

        Tensors that were halved without any loss of range, and integers, are only counted, so that a certificate stays small.
        """
        return {
            "actions": self.actions,
            "ledger": asdict(self.ledger),
            "fp32_modules": list(self.fp32_modules),
            "fp32_reasons": dict(self.fp32_reasons),
            "repairs": [{**asdict(repair), "nodes": list(repair.nodes)} for repair in self.repairs],
            "warnings": list(self.warnings),
            "tensors": [asdict(tensor) for tensor in self.tensors if tensor.is_remarkable],
        }
