"""Bring a model into the form that conversion works on: no functions, named nodes, known types, no float64, repaired."""

from __future__ import annotations

import numpy as np
import onnx_ir
from onnx_ir import AttributeType
from onnx_ir.passes.common import InlinePass

from halfserve.export.conversion_settings import ConversionSettings
from halfserve.export.export_errors import ExportError
from halfserve.export.onnx_fp16.conversion_report import Repair
from halfserve.export.onnx_fp16.element_types import infer_types
from halfserve.export.onnx_fp16.float64 import narrow_float64
from halfserve.export.onnx_fp16.graph import all_nodes, name_nodes
from halfserve.export.onnx_fp16.named_nodes import keep_reason
from halfserve.export.onnx_fp16.planning.plan import KEEP
from halfserve.export.onnx_fp16.repair import repairs_for, run_passes


def repair_model(model: onnx_ir.Model, settings: ConversionSettings | None = None) -> tuple[Repair, ...]:
    """Prepare and repair a model in place; it stays float32 and gives the same results. Return the repairs.

    Raises:
        ExportError: The model's functions cannot be inlined, or a repair failed.
    """
    settings = settings or ConversionSettings()
    narrowed = prepare(model, settings)
    for node in all_nodes(model):  # repairs leave alone what the user keeps in float32
        reason = keep_reason(node, settings)
        if reason is not None:
            node.metadata_props.setdefault(KEEP, reason)
    repairs = run_passes(model, repairs_for(settings))
    if repairs:
        name_nodes(model)
        _unify_constants(model)
        infer_types(model)
    return (*narrowed, *repairs)


def prepare(model: onnx_ir.Model, settings: ConversionSettings) -> tuple[Repair, ...]:
    """Inline functions, name nodes, write constants in one form, infer all types, and narrow float64 to float32.

    Functions are inlined because callers may need one body in float16 and in float32; runtimes inline them too. The nodes of a
    call that the user keeps in float32 by its name stay so. Returns the changes of float64.

    Raises:
        ExportError: The functions cannot be inlined, or float64 cannot be converted.
    """
    if model.functions:
        for node in all_nodes(model):
            reason = keep_reason(node, settings) if node.op_identifier() in model.functions else None
            if reason is not None:
                node.metadata_props[KEEP] = reason
        _inline(model)
    name_nodes(model)
    _unify_constants(model)
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
    model.functions.clear()  # functions without callers


def _unify_constants(model: onnx_ir.Model) -> None:
    """Write `value_float` and `value_floats` of Constant nodes as `value`: the former have no float16 form."""
    for node in all_nodes(model):
        if node.op_type != "Constant" or node.domain:
            continue
        for name, kind in (("value_float", AttributeType.FLOAT), ("value_floats", AttributeType.FLOATS)):
            attribute = node.attributes.get(name)
            if attribute is not None and attribute.type == kind and not attribute.is_ref():
                del node.attributes[name]
                tensor = onnx_ir.tensor(np.asarray(attribute.value, np.float32), name=node.outputs[0].name)
                node.attributes["value"] = onnx_ir.AttrTensor("value", tensor, attribute.doc_string)
