"""Raise a model's opset, where a later one has operators in one piece, or lets more of them compute in half precision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir

from halfserve.export.conversion_settings import ConversionSettings
from halfserve.export.export_errors import ExportError
from halfserve.export.half_types import FP16
from halfserve.export.onnx_files.external_data import detached
from halfserve.export.onnx_fp16.conversion_report import Repair
from halfserve.export.onnx_fp16.element_types import (
    LAST_RAISED,
    declared_values,
    first_opset_with_half,
    forget_inferred,
    infer_types,
    takes_half,
)
from halfserve.export.onnx_fp16.graph import FreshNames, all_graphs, all_nodes, operators
from halfserve.export.onnx_fp16.planning.decisions import NORMS, SOFTMAXES, SUMS
from halfserve.export.onnx_fp16.pool_windows import bound_to_kernel
from halfserve.export.onnx_fp16.repair.norms import FIRST_OPSET_WITH_LAYER_NORM
from halfserve.export.placement.cuda_kernels import lost_on_cuda, takes_on_cuda

UPGRADE = "upgrade-opset"
_LAST_REWRITTEN = 13  # ONNX's version converter raises older models to this opset; `_raise_node` does the rest
# They stay float32 in bfloat16 models, or create numbers from none, so a later opset gains nothing.
_NOT_WORTH_IT = (
    NORMS
    | SOFTMAXES
    | SUMS
    | operators(
        "Bernoulli BlackmanWindow Cast Constant ConstantOfShape EyeLike HammingWindow HannWindow MelWeightMatrix RandomNormal "
        "RandomNormalLike RandomUniform RandomUniformLike"
    )
)
_REDUCTIONS = operators(
    "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSumSquare"
)
_GRID_MODES = {"bilinear": "linear", "bicubic": "cubic"}


def upgrade_opset(model: onnx_ir.Model, settings: ConversionSettings) -> tuple[Repair, ...]:
    """Raise a model's opset in place, as far as that lets more nodes compute in half precision; weights stay where they lie.

    float16 gains from opset 17, which has LayerNormalization; bfloat16 from the first opset up to 22 at which all of the
    model's operators take it: 16 for Where, 22 for Conv. For CUDA, operators count that have a kernel there, and an opset at
    which another operator of the model loses its kernel is not used, unless a repair writes that by operators with a kernel:
    MaxPool has none from 22 on, and becomes slices.

    Returns:
        The change; empty where the model has that opset or a later one, or none of ONNX's own operators.

    Raises:
        ExportError: ONNX's version converter, which rewrites models older than opset 13, fails; or the model has functions, or
            a BatchNormalization in training mode.
    """
    before = model.opset_imports.get("")
    after = (
        FIRST_OPSET_WITH_LAYER_NORM
        if settings.half is FP16
        else max(FIRST_OPSET_WITH_LAYER_NORM, _first_opset(model, settings))
    )
    if before is None or before >= after:
        return ()
    if model.functions:
        raise ExportError(
            f"the model has functions, whose opset is not raised from {before}; inline them first, with onnx.inliner"
        )
    if before < _LAST_REWRITTEN:
        _rewrite(model)
    names = FreshNames(model)
    for node in all_nodes(model):
        if not node.domain:
            _raise_node(node, max(before, _LAST_REWRITTEN), after, names)
    model.opset_imports[""] = after
    return (Repair(pass_name=UPGRADE, nodes=(), text=f"opset {before} became {after}"),)


def _first_opset(model: onnx_ir.Model, settings: ConversionSettings) -> int:
    """Return the first opset at which as many of the model's operators as possible take the half type; at most LAST_RAISED."""
    opset, half, target_device = model.opset_imports.get("", 1), settings.half, settings.target_device
    used = bound_to_kernel(all_nodes(model), repair=settings.repair)
    gaining = {
        first
        for node in all_nodes(model)
        if node.op_type not in _NOT_WORTH_IT
        and not takes_half(node, model.opset_imports, half)
        and (first := first_opset_with_half(node, model.opset_imports, half)) is not None
        and first <= LAST_RAISED
        and (target_device == "cpu" or takes_on_cuda(node.op_type, first, half.elem_type))
    }
    return next(
        (first for first in sorted(gaining, reverse=True) if target_device == "cpu" or not lost_on_cuda(used, opset, first)), 0
    )


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


def _raise_node(node: onnx_ir.Node, before: int, after: int, names: FreshNames) -> None:
    """Write one of ONNX's own nodes as a later opset wants it; most operators only took more types and attributes."""
    if before < 14 <= after and node.op_type == "BatchNormalization" and sum(bool(value.name) for value in node.outputs) > 1:
        raise ExportError(
            f"the opset cannot be raised: BatchNormalization {node.name!r} trains; export the model for inference"
        )
    if before < 16 <= after and node.op_type == "RoiAlign":
        older = onnx_ir.AttrString("coordinate_transformation_mode", "output_half_pixel")  # the default before
        node.attributes.setdefault(older.name, older)
    if before < 18 <= after and node.op_type in _REDUCTIONS and (axes := node.attributes.pop("axes", None)) is not None:
        node.resize_inputs(2)
        node.replace_input_with(1, _whole_numbers(node, "axes", axes.as_ints(), names))
    if before < 18 <= after and node.op_type == "Split" and (len(node.inputs) < 2 or node.inputs[1] is None):
        node.attributes["num_outputs"] = onnx_ir.AttrInt64("num_outputs", len(node.outputs))
    if before < 20 <= after and node.op_type == "GridSample" and (mode := node.attributes.get("mode")) is not None:
        node.attributes["mode"] = onnx_ir.AttrString("mode", _GRID_MODES.get(mode.as_string(), mode.as_string()))
    if before < 20 <= after and node.op_type == "DFT":
        axis = node.attributes.pop("axis", None)
        node.resize_inputs(3)
        node.replace_input_with(2, _whole_numbers(node, "axis", None if axis is None else axis.as_int(), names))
    if 18 <= before < 21 <= after and node.op_type == "GroupNormalization":
        raise ExportError(
            f"the opset cannot be raised from {before} to {after}: GroupNormalization {node.name!r} has one scale for each "
            "group, from opset 21 on one for each channel; export the model at opset 21 or later, or leave --upgrade-opset out"
        )


def _whole_numbers(node: onnx_ir.Node, what: str, numbers: Sequence[int] | int | None, names: FreshNames) -> onnx_ir.Value:
    """Return a Constant node before `node` that holds what was an attribute; None stands for the old default of 1."""
    tensor = onnx_ir.tensor(np.asarray(1 if numbers is None else numbers, np.int64))
    name = names.value(f"{node.name or node.op_type}/{what}")
    made = onnx_ir.node("Constant", [], {"value": tensor}, name=names.node(name))
    made.outputs[0].name = name
    if node.graph is None:
        raise ValueError(node.name)
    node.graph.insert_before(node, made)
    return made.outputs[0]
