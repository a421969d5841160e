"""What `to_half` did to each tensor, and why: the record that travels in the certificate."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Literal

from export.weight_ledger import Ledger

Action = Literal["halved", "saturated", "kept", "untouched"]


@dataclass(frozen=True, kw_only=True)
class TensorDecision:
    """One parameter or buffer.

    Attributes:
        name: Dotted name, as in the module's `state_dict`.
        elements: How many numbers it holds.
        action: "halved" (rounded to float16), "saturated" (a mask: what is below float16's range became its most negative
            number), "kept" (stays float32, and its module with it) or "untouched" (integers, booleans).
        reason: Why, in a few words.
        ledger: What rounding it did, or would have done where it was kept.
    """

    name: str
    elements: int
    action: Action
    reason: str
    ledger: Ledger


@dataclass(frozen=True, kw_only=True)
class HalfReport:
    """Every decision of one conversion.

    Attributes:
        tensors: One decision for each parameter and buffer, in the module's order.
        fp32_modules: Dotted names of the submodules that run in float32, with casts at their borders ("" is the whole model).
    """

    tensors: tuple[TensorDecision, ...]
    fp32_modules: tuple[str, ...]

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
        remarkable = [
            asdict(tensor)
            for tensor in self.tensors
            if tensor.action in ("kept", "saturated") or (tensor.action == "halved" and tensor.ledger != Ledger())
        ]
        return {
            "actions": self.actions,
            "ledger": asdict(self.ledger),
            "fp32_modules": list(self.fp32_modules),
            "tensors": remarkable,
        }
