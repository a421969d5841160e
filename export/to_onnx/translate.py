"""A captured graph in ONNX's operators, simplified without a change of numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir
import torch
from onnx_ir.passes import common as passes
from onnxscript import optimizer, rewriter
from onnxscript.rewriter.rules import common as rules
from torch.nn.attention import SDPBackend, sdpa_kernel

from export.errors import ExportError
from export.to_onnx.angles import angle_translations
from export.to_onnx.attention import attention_translations
from export.to_onnx.body_outputs import make_inside
from export.to_onnx.functions import function_translations
from export.to_onnx.idle_operations import without
from export.to_onnx.layers import layer_translations
from export.to_onnx.messages import one_line, root
from export.to_onnx.recurrent import translations
from export.to_onnx.shifts import shift_translations
from export.to_onnx.silence import silenced

# onnxscript's own choice without what computes with weights: it folds a BatchNorm in the model's dtype, which in float16 ruins
# it, and drops biases that happen to be zero.
_REWRITES = (
    *(without(op_type, number) for op_type, number in (("Add", 0), ("Sub", 0), ("Mul", 1), ("Div", 1))),
    *(rules.dropout_zero_rule, rules.dropout_inference_rule),
    *(rules.one_reshape_matmul_reshape_rule, rules.two_reshapes_matmul_reshape_rule),
    *(rules.cast_constant_of_shape_rule, rules.cast_constant_of_shape_without_value_rule),
    *(rules.collapse_slice_rule, rules.collapse_slice2_rule),
    *(rules.no_op_expand_rule, rules.no_op_transpose_rule, rules.no_op_cast_rule),
    *(rules.reshape_reshape_rule, rules.squeeze_reshape_1d_rule, rules.transpose_transpose_rule),
    *(rules.unsqueeze_unsqueeze_rule, rules.slice_split_rule, rules.materialize_reshape_shape_rule),
    *(rules.no_op_static_scatter_nd_rule, rules.no_op_dynamic_scatter_nd_rule),
)


def translated(program: torch.export.ExportedProgram, *, inputs: int, outputs: int, opset_version: int | None) -> onnx_ir.Model:
    """The graph in ONNX, as torch's exporter makes it. Weights are still torch's tensors, not copies.

    Args:
        program: The captured graph.
        inputs: How many inputs it has.
        outputs: How many outputs.
        opset_version: The version of the default domain; None is torch's choice.

    Raises:
        ExportError: It uses what torch cannot express in ONNX, at all or in this version.
    """
    try:
        with silenced(), sdpa_kernel(SDPBackend.MATH):
            converted = torch.onnx.export(
                program,
                dynamo=True,
                verbose=False,
                optimize=False,
                opset_version=opset_version,
                custom_translation_table=_translations(opset_version),
                # Given real names, it may use the same ones for values inside the graph.
                input_names=[f"__halfserve_input_{index}" for index in range(inputs)],
                output_names=[f"__halfserve_output_{index}" for index in range(outputs)],
            )
    except Exception as error:
        raise ExportError(f"torch.onnx cannot express the model: {one_line(root(error))}") from error
    if converted is None:
        raise ExportError("torch.onnx gave no model back; upgrade torch to 2.11 or later")
    model = converted.model
    reached = model.opset_imports.get("")
    if opset_version is not None and reached != opset_version:
        raise ExportError(f"the model cannot be expressed in opset {opset_version}, only in {reached}; choose that or None")
    return model


def _translations(opset_version: int | None) -> dict[Callable[..., Any], Callable[..., Any]]:
    """What is said otherwise than torch says it."""
    functions = function_translations() | angle_translations() | shift_translations()
    return translations() | attention_translations(opset_version) | layer_translations() | functions


def simplify(model: onnx_ir.Model) -> None:
    """Fold constants, drop what does nothing, and share what is computed twice; in place."""
    with silenced():
        passes.InlinePass()(model)
        for _ in range(2):
            optimizer.fold_constants_ir(model, onnx_shape_inference=True, should_fold=_should_fold)
            rewriter.rewrite(model, pattern_rewrite_rules=_REWRITES)
        for tidy in (
            passes.IdentityEliminationPass(),
            passes.RemoveUnusedNodesPass(),
            passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
            passes.LiftSubgraphInitializersToMainGraphPass(),
            passes.DeduplicateInitializersPass(),
            passes.CommonSubexpressionEliminationPass(),
            passes.OutputFixPass(),
        ):
            tidy(model)
        make_inside(model)
        passes.NameFixPass()(model)


def _should_fold(node: onnx_ir.Node) -> bool | None:
    # Transposed weights were made views of the weight before (weights.py); what is left is used twice and would be copied.
    return False if node.op_type == "Transpose" else None
