"""Raises a model to the opset in which a LayerNormalization is one operator."""

from __future__ import annotations

from collections import Counter

import onnx
import onnx_ir

from export.errors import ExportError
from export.files.tensor_outline import outlined
from export.onnx_fp16.element_types.value_types import declared_values, forget_inferred, infer_types
from export.onnx_fp16.graph_walk import all_graphs, all_nodes
from export.onnx_fp16.report import Repair

FIRST_OPSET_WITH_LAYER_NORM = 17
NAME = "upgrade-opset"
# From here to opset 17 operators only took more types and attributes, but for the two in `_raise_nodes`.
_LAST_REWRITTEN = 13


def offer(opset: int) -> str:
    """What to say of the parts of a norm in a model of an older opset."""
    return (
        f"part of a LayerNormalization, one operator from opset {FIRST_OPSET_WITH_LAYER_NORM} on; the model has {opset}: "
        "--upgrade-opset (upgrade_opset=True) raises it"
    )


def upgrade_opset(model: onnx_ir.Model) -> tuple[Repair, ...]:
    """Raise a model of an older opset to 17, in place; weights stay where they lie.

    Returns:
        What was done; empty where the model is of opset 17 or later, or uses none of ONNX's own operators.

    Raises:
        ExportError: ONNX's version converter, which rewrites what is older than opset 13, does not take the model; or it has
            functions, or a BatchNormalization that trains.
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
    return (Repair(pass_name=NAME, nodes=(), text=f"opset {before} became {FIRST_OPSET_WITH_LAYER_NORM}"),)


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
        with outlined(model) as outline:
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
