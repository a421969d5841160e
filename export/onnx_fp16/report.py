"""What a conversion did: how much is float16, what stayed float32 and why, what was repaired, what rounding did to weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Literal

from export.weight_ledger import Ledger

Action = Literal["halved", "saturated", "kept"]


@dataclass(frozen=True, kw_only=True)
class Repair:
    """One rewrite of the float32 graph before it was converted.

    Attributes:
        pass_name: The pass that made it.
        nodes: Names of the nodes that it concerns.
        text: What was done and why, in one line.
    """

    pass_name: str
    nodes: tuple[str, ...]
    text: str


@dataclass(frozen=True, kw_only=True)
class KeptNode:
    """A node that computes on floats and stayed float32.

    Attributes:
        name: Its name in the converted model.
        op_type: Its operator.
        reason: Why, in a few words.
        module: The torch module that it comes from, where the model says so.
        source: "package/file.py:42" of the line that it comes from, where the model says so.
    """

    name: str
    op_type: str
    reason: str
    module: str | None = None
    source: str | None = None


@dataclass(frozen=True, kw_only=True)
class TensorLedger:
    """What rounding did to one tensor of weights, or would have done where it was kept.

    Attributes:
        name: The initializer's name, or that of the value which a constant node gives.
        elements: How many numbers it holds.
        ledger: The counts.
        action: "halved" (rounded), "saturated" (a mask: what is beyond float16's range became its nearest number) or "kept"
            (stays float32).
    """

    name: str
    elements: int
    ledger: Ledger
    action: Action = "halved"


@dataclass(frozen=True, kw_only=True)
class ConversionReport:
    """Everything that one conversion decided.

    Attributes:
        float_nodes: Nodes that compute on floats, bodies of control flow included, and for which there is float16; casts,
            constants and identities are not counted.
        fp16_nodes: How many of them compute in float16 now.
        unsupported_nodes: Float nodes beyond those: ONNX, or ONNX Runtime's CPU, has no float16 for them. They are in `kept`.
        casts_added: Cast nodes that the converted model has more than the original had; negative where it has fewer.
        repairs: In the order in which they were made.
        kept: The nodes that stayed float32, in the graph's order.
        weights: Tensors that rounding did something to, and those to which it would have and that were kept. Others are only
            counted.
        rounded: How many tensors were rounded in all.
        random_nodes: What draws random numbers, as "RandomNormalLike 'noise'"; a seed that the operator states is added. What
            depends on them differs from run to run, so that a comparison proves little of it.
        converted_before: The model was this converter's own work with these settings, and was left as it is.
    """

    float_nodes: int
    fp16_nodes: int
    unsupported_nodes: int = 0
    casts_added: int = 0
    repairs: tuple[Repair, ...] = ()
    kept: tuple[KeptNode, ...] = ()
    weights: tuple[TensorLedger, ...] = ()
    rounded: int = 0
    random_nodes: tuple[str, ...] = ()
    converted_before: bool = False

    @property
    def ledger(self) -> Ledger:
        """The counts of all tensors that were rounded."""
        return sum((tensor.ledger for tensor in self.weights if tensor.action != "kept"), Ledger())

    @property
    def share(self) -> float:
        """Float16's share of the nodes that could compute in it; 1 where there are none."""
        return self.fp16_nodes / self.float_nodes if self.float_nodes else 1.0

    @property
    def actions(self) -> dict[str, int]:
        """How many tensors met each action."""
        counts = Counter(tensor.action for tensor in self.weights if tensor.action != "halved")
        return {"halved": self.rounded - counts["saturated"], **dict(sorted(counts.items()))}

    def to_json(self) -> dict[str, Any]:
        """The report as JSON's own types."""
        return {
            "float_nodes": self.float_nodes,
            "fp16_nodes": self.fp16_nodes,
            "unsupported_nodes": self.unsupported_nodes,
            "casts_added": self.casts_added,
            "converted_before": self.converted_before,
            "random_nodes": list(self.random_nodes),
            "repairs": [{**asdict(repair), "nodes": list(repair.nodes)} for repair in self.repairs],
            "kept": [asdict(node) for node in self.kept],
            "fp32_modules": list(dict.fromkeys(node.module for node in self.kept if node.module)),
            "ledger": asdict(self.ledger),
            "actions": self.actions,
            "tensors": [asdict(tensor) for tensor in self.weights],
        }
