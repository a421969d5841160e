"""Bring a model into the form that conversion works on: newer opset, no functions, named nodes, known types, repaired."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir
from onnx_ir import AttributeType
from onnx_ir.passes.common import InlinePass

from halfserve.export.errors import ExportError
from halfserve.export.onnx_files.external_data import detached
from halfserve.export.onnx_fp16.element_types import declared_values, forget_inferred, infer_types
from halfserve.export.onnx_fp16.float64 import narrow_float64
from halfserve.export.onnx_fp16.graph import all_graphs, all_nodes, name_nodes
from halfserve.export.onnx_fp16.planning.plan import KEEP
from halfserve.export.onnx_fp16.repair import REPAIRS, run_passes
from halfserve.export.onnx_fp16.repair.norms import FIRST_OPSET_WITH_LAYER_NORM
from halfserve.export.onnx_fp16.report import Repair
from halfserve.export.onnx_fp16.settings import Settings, block_reason

UPGRADE = "upgrade-opset"
_LAST_REWRITTEN = 13  # from this opset on, see `_raise_nodes`


def repair_model(model: onnx_ir.Model, settings: Settings | None = None) -> tuple[Repair, ...]:
    """Prepare and repair a model in place; it stays float32 and gives the same results.

    Args:
        model: A float32 model.
        settings: The user's settings; the defaults when missing.

    Returns:
        The repairs.

    Raises:
        ExportError: The model's functions cannot be inlined, or a repair failed.
    """
    settings = settings or Settings()
    narrowed = prepare(model, settings)
    for node in all_nodes(model):  # repairs leave alone what the user blocks
        reason = block_reason(node, settings)
        if reason is not None:
            node.metadata_props.setdefault(KEEP, reason)
    repairs = run_passes(model, REPAIRS)
    if repairs:
        name_nodes(model)
        _unify_constants(model)
        infer_types(model)
    return (*narrowed, *repairs)


def prepare(model: onnx_ir.Model, settings: Settings) -> tuple[Repair, ...]:
    """Inline functions, name nodes, write constants in one form, infer all types, and narrow float64 to float32.

    Functions are inlined because callers may need one body in float16 and in float32; runtimes inline them too. The nodes of a
    call that the user blocks by its name stay blocked.

    Returns:
        The changes of float64.

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


def upgrade_opset(model: onnx_ir.Model) -> tuple[Repair, ...]:
    """Raise a model of an older opset to 17, in place; weights stay where they lie.

    Returns:
        The change; empty where the model has opset 17 or later, or none of ONNX's own operators.

    Raises:
        ExportError: ONNX's version converter, which rewrites models older than opset 13, fails; or the model has functions, or
            a BatchNormalization in training mode.
    """
    before = model.opset_imports.get("")
    if before is None or before >= FIRST_OPSET_WITH_LAYER_NORM:
        return ()
    if model.functions:
        raise ExportError(
            f"the model has functions, whose opset is not raised from {before}; inline them first, with onnx.inliner"
        )
    if before < _LAST_REWRITTEN:
        _rewrite(model)
    _raise_nodes(model)
    model.opset_imports[""] = FIRST_OPSET_WITH_LAYER_NORM
    return (Repair(pass_name=UPGRADE, nodes=(), text=f"opset {before} became {FIRST_OPSET_WITH_LAYER_NORM}"),)


def _rewrite(model: onnx_ir.Model) -> None:
    """Let ONNX's converter raise the model to opset 13; it keeps names, and drops the nodes' metadata."""
    tensors = {value.name: value.const_value for graph in all_graphs(model) for value in graph.initializers.values()}
    counts = Counter(name for graph in all_graphs(model) for name in graph.initializers)
    twice = next((name for name, count in counts.items() if count > 1), None)
    if twice is not None:
        raise ExportError(f"the opset cannot be raised: two bodies have a weight {twice!r}; leave --upgrade-opset out")
    nodes = {node.name: node for node in all_nodes(model) if node.name}
    declared = {value.name for value in declared_values(model)}
    infer_types(model)  # where the rank is known, a Softmax need not be flattened
    try:
        with detached(model) as outline:
            raised = onnx_ir.from_proto(onnx.version_converter.convert_version(outline.proto, _LAST_REWRITTEN))
    except (onnx.version_converter.ConvertError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()
        raise ExportError(
            f"ONNX's version converter cannot raise the model to opset {_LAST_REWRITTEN}: "
            f"{reason[0] if reason else 'no reason given'}; leave --upgrade-opset out"
        ) from error
    for graph in all_graphs(raised):
        for name, value in graph.initializers.items():
            value.const_value = tensors.get(name, value.const_value)
    for node in all_nodes(raised):
        if (old := nodes.get(node.name or "")) is not None:
            node.metadata_props.update(old.metadata_props)
            node.doc_string = old.doc_string
    model.graph = raised.graph
    forget_inferred(model, {value for value in declared_values(model) if value.name in declared})


def _raise_nodes(model: onnx_ir.Model) -> None:
    """From opset 13 to 17 operators only took more types and attributes, except for these two."""
    for node in all_nodes(model):
        if node.domain:
            continue
        if node.op_type == "BatchNormalization" and sum(bool(value.name) for value in node.outputs) > 1:
            raise ExportError(
                f"the opset cannot be raised: BatchNormalization {node.name!r} trains; export the model for inference"
            )
        if node.op_type == "RoiAlign" and "coordinate_transformation_mode" not in node.attributes:
            node.attributes["coordinate_transformation_mode"] = onnx_ir.AttrString(
                "coordinate_transformation_mode", "output_half_pixel"
            )
