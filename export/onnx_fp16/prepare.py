"""Brings a model into the form that conversion works on: no functions, nodes named, constants in one form, types known."""

from __future__ import annotations

import onnx_ir
from onnx_ir.passes.common import InlinePass

from export.errors import ExportError
from export.onnx_fp16.constant_nodes import unify_constants
from export.onnx_fp16.element_types.value_types import infer_types
from export.onnx_fp16.float64 import narrow_float64
from export.onnx_fp16.graph_walk import all_nodes
from export.onnx_fp16.names import name_nodes
from export.onnx_fp16.passes import run_passes
from export.onnx_fp16.planning.block_lists import block_reason
from export.onnx_fp16.planning.reasons import KEEP
from export.onnx_fp16.repair import REPAIRS
from export.onnx_fp16.report import Repair
from export.onnx_fp16.settings import Settings


def repair_model(model: onnx_ir.Model, settings: Settings | None = None) -> tuple[Repair, ...]:
    """Prepare a model and repair it, in place, as `convert` does before it converts: still float32, with the same results.

    Args:
        model: A float32 model.
        settings: What the user asked for; the defaults when missing.

    Returns:
        What was repaired.

    Raises:
        ExportError: The model's functions cannot be inlined, or a repair failed.
    """
    settings = settings or Settings()
    narrowed = prepare(model, settings)
    for node in all_nodes(model):  # what the user blocks by name keeps its node, and the repairs' hands off it
        reason = block_reason(node, settings)
        if reason is not None:
            node.metadata_props.setdefault(KEEP, reason)
    repairs = run_passes(model, REPAIRS)
    if repairs:
        name_nodes(model)
        unify_constants(model)
        infer_types(model)
    return (*narrowed, *repairs)


def prepare(model: onnx_ir.Model, settings: Settings) -> tuple[Repair, ...]:
    """Inline functions, name nodes, write constants in one form, infer all types, and let float32 compute for float64.

    Functions are inlined because their types depend on who calls them: one body can be wanted in float16 by one caller and in
    float32 by another. Runtimes inline them too. What the user blocks by the name of a call stays blocked in its parts.

    Returns:
        What computed in float64.

    Raises:
        ExportError: The functions cannot be inlined, or float64 cannot be converted.
    """
    if model.functions:
        for node in all_nodes(model):
            reason = block_reason(node, settings) if node.op_identifier() in model.functions else None
            if reason is not None:
                node.metadata_props[KEEP] = reason
        _inline(model)
    name_nodes(model)
    unify_constants(model)
    infer_types(model)
    narrowed = narrow_float64(model, settings)
    if narrowed:
        infer_types(model)
    return narrowed


def _inline(model: onnx_ir.Model) -> None:
    try:
        InlinePass()(model)
    except (ValueError, onnx_ir.passes.InvariantError) as error:
        raise ExportError(
            f"the model's functions cannot be inlined: {str(error).splitlines()[0]}; inline them before, with onnx.inliner"
        ) from error
    model.functions.clear()  # what nobody calls
