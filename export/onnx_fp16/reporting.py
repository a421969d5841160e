"""Draws up the report of a conversion."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx_ir

from export.onnx_fp16.element_types.value_types import infer_types
from export.onnx_fp16.graph_walk import FLOAT, FLOAT16, all_nodes, constant_of
from export.onnx_fp16.planning.node_places import computes_on_floats
from export.onnx_fp16.planning.op_sets import RANDOM
from export.onnx_fp16.planning.plan import Plan
from export.onnx_fp16.planning.weight_range import WeightRange
from export.onnx_fp16.report import Action, ConversionReport, KeptNode, Repair, TensorLedger
from export.weight_ledger import Ledger

# They compute nothing.
_UNCOUNTED = frozenset({"Cast", "CastLike", "Constant", "Identity"})


def float_nodes(model: onnx_ir.Model) -> list[onnx_ir.Node]:
    """The nodes that compute on float32 or float16; types must be known."""
    return [node for node in all_nodes(model) if node.op_type not in _UNCOUNTED and computes_on_floats(node)]


def holds_half(model: onnx_ir.Model) -> bool:
    """Whether any node takes or gives float16."""
    return any(FLOAT16 in _types(node) for node in all_nodes(model))


def random_nodes(model: onnx_ir.Model) -> tuple[str, ...]:
    """The nodes that draw random numbers, each with its operator and the seed that it states."""
    drawing = (node for node in all_nodes(model) if not node.domain and (node.op_type in RANDOM or _drops(node)))
    return tuple(f"{node.op_type} {node.name!r}{_seed(node)}" for node in drawing)


def _drops(node: onnx_ir.Node) -> bool:
    """Whether a Dropout may be in training mode."""
    training = node.inputs[2] if node.op_type == "Dropout" and len(node.inputs) > 2 else None
    stated = constant_of(training)
    return training is not None and (stated is None or bool(stated.numpy().any()))


def _seed(node: onnx_ir.Node) -> str:
    seed = node.attributes.get("seed")
    return "" if seed is None else f" (seed {seed.value:g})"


def count_casts(model: onnx_ir.Model) -> int:
    """How many Cast nodes there are."""
    return sum(node.op_type == "Cast" and not node.domain for node in all_nodes(model))


def report_of(
    plan: Plan,
    counted: Sequence[onnx_ir.Node],
    repairs: tuple[Repair, ...],
    ranges: WeightRange,
    halved: Sequence[onnx_ir.Value],
    *,
    casts_before: int,
) -> ConversionReport:
    """The report of a plan that was carried out.

    Args:
        plan: What was decided.
        counted: The float nodes before the conversion.
        repairs: What was repaired first.
        ranges: What is known of the weights.
        halved: The weights that were rounded.
        casts_before: How many Cast nodes the original had.
    """
    kept = [node for node in counted if node in plan.kept]
    unsupported = sum(node in plan.unsupported for node in counted)
    return ConversionReport(
        float_nodes=len(counted) - unsupported,
        fp16_nodes=len(counted) - len(kept),
        unsupported_nodes=unsupported,
        casts_added=count_casts(plan.model) - casts_before,
        repairs=repairs,
        kept=tuple(_kept(node, plan.kept[node]) for node in kept),
        weights=tuple(_remarkable(plan, ranges, halved)),
        rounded=len(halved),
        random_nodes=random_nodes(plan.model),
    )


def report_unchanged(model: onnx_ir.Model) -> ConversionReport:
    """The report for a model that was converted before, which is only looked at."""
    model = model.clone()
    infer_types(model)
    counted = float_nodes(model)
    single = [node for node in counted if FLOAT16 not in _types(node)]
    return ConversionReport(
        float_nodes=len(counted),
        fp16_nodes=len(counted) - len(single),
        kept=tuple(_kept(node, "the earlier conversion kept it") for node in single),
        random_nodes=random_nodes(model),
        converted_before=True,
    )


def _types(node: onnx_ir.Node) -> set[onnx_ir.DataType | None]:
    return {value.dtype for value in (*node.inputs, *node.outputs) if value is not None} & {FLOAT, FLOAT16}


def _kept(node: onnx_ir.Node, reason: str) -> KeptNode:
    return KeptNode(
        name=node.name or "",
        op_type=f"{node.domain}:{node.op_type}" if node.domain else node.op_type,
        reason=reason,
        module=node.metadata_props.get("halfserve.module"),
        source=node.metadata_props.get("halfserve.source"),
    )


def _remarkable(plan: Plan, ranges: WeightRange, halved: Sequence[onnx_ir.Value]) -> Iterator[TensorLedger]:
    rounded = set(halved)
    for value, known in ranges.scans.items():
        if known.ledger == Ledger():
            continue
        maker = value.producer()
        filled = maker is not None and maker.op_type == "ConstantOfShape" and maker not in plan.kept
        action: Action = "saturated" if value in plan.saturated else "halved"
        if value not in rounded and not filled:
            action = "kept"
        yield TensorLedger(name=value.name or "", elements=known.elements, ledger=known.ledger, action=action)
