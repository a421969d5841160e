"""The core converter: a float32 `onnx_ir.Model` becomes float16, in place."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import onnx
import onnx_ir

from export.errors import ExportError
from export.files.format_opset import format_opset
from export.onnx_fp16.casting import Caster
from export.onnx_fp16.cleanup import drop_idle_casts
from export.onnx_fp16.element_types.value_types import declared_values, forget_inferred
from export.onnx_fp16.float64 import STAYING
from export.onnx_fp16.graph_walk import all_nodes, bodies
from export.onnx_fp16.mark import is_marked, mark
from export.onnx_fp16.planning.block_lists import Known, require_known
from export.onnx_fp16.planning.containers import settle_containers
from export.onnx_fp16.planning.islands import close_islands
from export.onnx_fp16.planning.op_sets import MOVERS
from export.onnx_fp16.planning.plan import Plan, blank_plan
from export.onnx_fp16.planning.reasons import keep_nodes
from export.onnx_fp16.planning.weight_range import WeightRange
from export.onnx_fp16.prepare import prepare, repair_model
from export.onnx_fp16.report import ConversionReport, Repair
from export.onnx_fp16.reporting import count_casts, float_nodes, holds_half, report_of, report_unchanged
from export.onnx_fp16.settings import settings_of
from export.onnx_fp16.upgrade_opset import upgrade_opset as upgrade

FIRST_OPSET_WITH_CASTS = 6  # that say types by number
_COMPUTE_NOTHING = MOVERS | {"Cast", "CastLike", "Constant"}


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A converted model.

    Attributes:
        model: The model, the same object that was given.
        report: What was done.
    """

    model: onnx_ir.Model
    report: ConversionReport


def convert(
    model: onnx_ir.Model,
    *,
    keep_io_types: bool | Collection[str] = True,
    op_block_list: Collection[str] = (),
    node_block_list: Collection[str] = (),
    repair: bool = True,
) -> Conversion:
    """Convert a float32 model to float16, in place.

    Every node whose operator has float16 at the model's opset computes in it, except where float16 would break the model; each
    exception is in the report with its reason. What computes in float64 is converted through float32, and the report says so;
    inputs and outputs that keep their types stay float64 then. Casts stand where the two types meet. Weights that lie in files
    are rounded when they are read, the others at once. Names, metadata and opsets stay; values of which the model said nothing
    carry no type in the end. A model that this function converted before, with the same settings, stays as it is.

    Args:
        model: The model. Its tensors may lie in files.
        keep_io_types: True: inputs and outputs keep their types, with casts behind and before them; False: they become float16;
            or names and shell patterns of those that keep theirs.
        op_block_list: Operators that stay float32, by name ("Softmax", "com.microsoft:Attention") or shell pattern.
        node_block_list: Nodes that stay float32, by name or shell pattern; with a node, all that is in its bodies.
        repair: Whether to rewrite first what float16 could not hold (`export.onnx_fp16.repair`).

    Returns:
        The model and the report.

    Raises:
        ExportError: A list names something that the model does not have, functions cannot be inlined, a node computes in
            bfloat16, nothing can be float16 because of nodes that take nothing but float64, a repair failed, or casts are
            needed in a model from before opset 6.
    """
    settings = settings_of(keep_io_types, op_block_list, node_block_list, repair)
    if is_marked(model, settings):
        return Conversion(model=model, report=report_unchanged(model))
    known, casts, declared = Known(model), count_casts(model), declared_values(model)
    repairs = repair_model(model, settings) if repair else prepare(model, settings)
    _refuse_bfloat16(model)
    known.add(model)
    require_known(known, settings)
    counted = float_nodes(model)
    plan = blank_plan(model, settings)
    ranges = _decide(plan)
    caster = Caster(plan, ranges)
    caster.apply()
    _require_casts(model, caster)
    drop_idle_casts(model)
    _import_opset(model)
    if holds_half(model):
        mark(model, settings)
    else:
        _refuse_float64(repairs)
    report = report_of(plan, counted, repairs, ranges, caster.halved, casts_before=casts)
    forget_inferred(model, declared)
    return Conversion(model=model, report=report)


def convert_upgraded(
    model: onnx_ir.Model,
    *,
    keep_io_types: bool | Collection[str],
    op_block_list: Collection[str],
    node_block_list: Collection[str],
    repair: bool,
    upgrade_opset: bool,
) -> Conversion:
    """As `convert`, with the model's opset raised first if that is asked for (see `export.onnx_fp16.upgrade_opset`)."""
    raised = upgrade(model) if upgrade_opset else ()
    done = convert(
        model, keep_io_types=keep_io_types, op_block_list=op_block_list, node_block_list=node_block_list, repair=repair
    )
    return replace(done, report=replace(done.report, repairs=(*raised, *done.report.repairs)))


def _decide(plan: Plan) -> WeightRange:
    keep_nodes(plan)
    settle_containers(plan)
    ranges = WeightRange(plan)
    ranges.apply()
    settle_containers(plan)  # again: a kept node may hold a sequence
    close_islands(plan)
    return ranges


def _refuse_bfloat16(model: onnx_ir.Model) -> None:
    """Such nodes would stay as they are, in a model that is to be float16 and that is taken for one."""
    for node in all_nodes(model):
        if node.op_type in _COMPUTE_NOTHING or any(bodies(node)):
            continue
        if any(value is not None and value.dtype == onnx_ir.DataType.BFLOAT16 for value in (*node.inputs, *node.outputs)):
            raise ExportError(
                f"{node.op_type} {node.name!r} computes in bfloat16; expected a float32 model: export it again from the module "
                "after .float(), which keeps every weight's value, and convert that"
            )


def _refuse_float64(repairs: tuple[Repair, ...]) -> None:
    """A model without any float16 whose nodes stay in float64 would be written as it came, and be taken for float16."""
    staying = next((repair for repair in repairs if repair.pass_name == STAYING), None)
    if staying is not None:
        raise ExportError(
            f"nothing in the model can become float16: {staying.nodes[0]!r} {staying.text}; export the model in float32, from "
            "the module after .float(), and convert that"
        )


def _require_casts(model: onnx_ir.Model, caster: Caster) -> None:
    opset = model.opset_imports.get("", FIRST_OPSET_WITH_CASTS)
    if caster.added and opset < FIRST_OPSET_WITH_CASTS:
        raise ExportError(
            f"the model has opset {opset}, whose Cast names types by text; expected {FIRST_OPSET_WITH_CASTS} or later: "
            "raise it with onnx.version_converter, or let inputs and outputs become float16 where that needs no cast"
        )


def _import_opset(model: onnx_ir.Model) -> None:
    """Import ONNX's own operators where a model of another domain alone got casts."""
    if "" in model.opset_imports or not any(node.domain == "" for node in all_nodes(model)):
        return
    model.opset_imports[""] = format_opset(model.ir_version or onnx.IR_VERSION)
