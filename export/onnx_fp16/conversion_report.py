"""The report of a conversion: what is float16, what stayed float32 and why, what was repaired, what rounding did to weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import onnx_ir

from halfserve.export.conversion_settings import ConversionSettings
from halfserve.export.half_types import HALF_BY_ELEM_TYPE, HalfName, HalfType, TargetDevice, WeightLedger
from halfserve.export.onnx_fp16.element_types import infer_types
from halfserve.export.onnx_fp16.graph import FLOAT, RANDOM, all_nodes, constant_of
from halfserve.export.onnx_fp16.planning.plan import CastingPlan, computes_on_floats
from halfserve.export.onnx_fp16.planning.weights import WeightRange

Action = Literal["halved", "saturated", "kept"]
# They compute nothing.
_UNCOUNTED = frozenset({"Cast", "CastLike", "Constant", "Identity"})


@dataclass(frozen=True, kw_only=True)
class Repair:
    """One rewrite of the float32 graph before its conversion: the pass, the nodes, the change and its reason in one line."""

    pass_name: str
    nodes: tuple[str, ...]
    text: str


@dataclass(frozen=True, kw_only=True)
class KeptNode:
    """A node that computes on floats and stayed float32.

    Attributes:
        name: The node's name in the converted model.
        op_type: The node's operator.
        reason: The reason, in a few words.
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
    """Effect of rounding on one tensor of weights, or the effect that it would have had on a tensor that was kept.

    Attributes:
        name: The name of the initializer, or of a constant node's result.
        elements: The number of elements.
        ledger: The counts.
        action: "halved" (rounded), "saturated" (a mask: values beyond the type's range became its nearest number) or "kept"
            (stays float32).
    """

    name: str
    elements: int
    ledger: WeightLedger
    action: Action = "halved"


@dataclass(frozen=True, kw_only=True)
class ConversionReport:
    """The result of one conversion.

    Attributes:
        dtype: The half-precision type, "float16" or "bfloat16".
        target_device: Where the model shall run: "cuda", "cpu" or "any".
        float_nodes: The number of nodes, bodies included, that compute on floats and can compute in that type, without casts,
            constants and identities.
        fp16_nodes: The number of these that compute in `dtype` now; the name is older than bfloat16.
        unsupported_nodes: The number of other float nodes: ONNX, or ONNX Runtime's CPU, has no `dtype` for them. They are in
            `kept`.
        casts_added: Cast nodes of the converted model less those of the original; may be negative.
        repairs: The repairs, in the order in which they were made.
        kept: The nodes that stayed float32, in the graph's order.
        weights: The tensors that rounding changed by more than its usual error, or would have changed where they were kept.
        rounded: The number of all tensors that were rounded.
        random_nodes: The nodes that draw random numbers, as "RandomNormalLike 'noise'", with the seed if one is stated. Results
            that depend on them differ from run to run, so that a comparison proves little.
        converted_before: Whether this converter made the model with these settings before; the model is unchanged then.
    """

    float_nodes: int
    fp16_nodes: int
    dtype: HalfName = "float16"
    target_device: TargetDevice = "any"
    unsupported_nodes: int = 0
    casts_added: int = 0
    repairs: tuple[Repair, ...] = ()
    kept: tuple[KeptNode, ...] = ()
    weights: tuple[TensorLedger, ...] = ()
    rounded: int = 0
    random_nodes: tuple[str, ...] = ()
    converted_before: bool = False

    @property
    def ledger(self) -> WeightLedger:
        """The counts of all tensors that were rounded."""
        return sum((tensor.ledger for tensor in self.weights if tensor.action != "kept"), WeightLedger())

    @property
    def share(self) -> float:
        """Share of the half type among the nodes that could compute in it; 1 where there are none."""
        return self.fp16_nodes / self.float_nodes if self.float_nodes else 1.0

    @property
    def actions(self) -> dict[str, int]:
        """The number of tensors by action."""
        counts = Counter(tensor.action for tensor in self.weights if tensor.action != "halved")
        return {"halved": self.rounded - counts["saturated"], **dict(sorted(counts.items()))}

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON's own types."""
        return {
            "dtype": self.dtype,
            "target_device": self.target_device,
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


def float_nodes(model: onnx_ir.Model) -> list[onnx_ir.Node]:
    """Return the nodes that compute on float32 or half precision; types must be known."""
    return [node for node in all_nodes(model) if node.op_type not in _UNCOUNTED and computes_on_floats(node)]


def holds_half(model: onnx_ir.Model, half: HalfType) -> bool:
    """Return whether any node has an input or output of the half type."""
    return any(half.elem_type in _types(node) for node in all_nodes(model))


def _random_nodes(model: onnx_ir.Model) -> tuple[str, ...]:
    drawing = (node for node in all_nodes(model) if not node.domain and (node.op_type in RANDOM or _drops(node)))
    return tuple(f"{node.op_type} {node.name!r}{_seed(node)}" for node in drawing)


def _drops(node: onnx_ir.Node) -> bool:
    """Return whether a Dropout may be in training mode."""
    training = node.inputs[2] if node.op_type == "Dropout" and len(node.inputs) > 2 else None
    stated = constant_of(training)
    return training is not None and (stated is None or bool(stated.numpy().any()))


def _seed(node: onnx_ir.Node) -> str:
    seed = node.attributes.get("seed")
    return "" if seed is None else f" (seed {seed.value:g})"


def count_casts(model: onnx_ir.Model) -> int:
    return sum(node.op_type == "Cast" and not node.domain for node in all_nodes(model))


def report_of(
    plan: CastingPlan,
    counted: Sequence[onnx_ir.Node],
    repairs: tuple[Repair, ...],
    ranges: WeightRange,
    halved: Sequence[onnx_ir.Value],
    *,
    casts_before: int,
) -> ConversionReport:
    """Return the report of a plan after its conversion.

    `counted` are the float nodes before the conversion, `halved` the weights that were rounded, and `casts_before` is the
    number of Cast nodes in the original.
    """
    kept = [node for node in counted if node in plan.kept]
    unsupported = sum(node in plan.unsupported for node in counted)
    return ConversionReport(
        dtype=plan.half.name,
        target_device=plan.settings.target_device,
        float_nodes=len(counted) - unsupported,
        fp16_nodes=len(counted) - len(kept),
        unsupported_nodes=unsupported,
        casts_added=count_casts(plan.model) - casts_before,
        repairs=repairs,
        kept=tuple(_kept(node, plan.kept[node]) for node in kept),
        weights=tuple(_remarkable(plan, ranges, halved)),
        rounded=len(halved),
        random_nodes=_random_nodes(plan.model),
    )


def report_unchanged(model: onnx_ir.Model, settings: ConversionSettings) -> ConversionReport:
    """Return the report of a model that was converted before."""
    model, half = model.clone(), settings.half
    infer_types(model)
    counted = float_nodes(model)
    single = [node for node in counted if half.elem_type not in _types(node)]
    return ConversionReport(
        dtype=half.name,
        target_device=settings.target_device,
        float_nodes=len(counted),
        fp16_nodes=len(counted) - len(single),
        kept=tuple(_kept(node, "the earlier conversion kept it") for node in single),
        random_nodes=_random_nodes(model),
        converted_before=True,
    )


def _types(node: onnx_ir.Node) -> set[int]:
    """Return the float32 and half types, by number, among a node's inputs and outputs."""
    found = {value.dtype for value in (*node.inputs, *node.outputs) if value is not None}
    return {int(dtype) for dtype in found if dtype is not None} & {int(FLOAT), *HALF_BY_ELEM_TYPE}


def _kept(node: onnx_ir.Node, reason: str) -> KeptNode:
    return KeptNode(
        name=node.name or "",
        op_type=f"{node.domain}:{node.op_type}" if node.domain else node.op_type,
        reason=reason,
        module=node.metadata_props.get("halfserve.module"),
        source=node.metadata_props.get("halfserve.source"),
    )


def _remarkable(plan: CastingPlan, ranges: WeightRange, halved: Sequence[onnx_ir.Value]) -> Iterator[TensorLedger]:
    rounded = set(halved)
    for value, known in ranges.scans.items():
        if known.ledger == WeightLedger():
            continue
        maker = value.producer()
        filled = maker is not None and maker.op_type == "ConstantOfShape" and maker not in plan.kept
        action: Action = "saturated" if value in plan.saturated else "halved"
        if value not in rounded and not filled:
            action = "kept"
        yield TensorLedger(name=value.name or "", elements=known.elements, ledger=known.ledger, action=action)
