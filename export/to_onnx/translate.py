"""A captured graph in ONNX's operators, simplified without a change of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir
import torch
from onnx_ir.passes import common as passes
from onnx_ir.tensor_adapters import from_torch_dtype
from onnxscript import optimizer, rewriter
from onnxscript.rewriter import pattern
from onnxscript.rewriter.rules import common as rules
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from halfserve.export.export_errors import ExportError
from halfserve.export.to_onnx.capture import one_line, root, silenced
from halfserve.export.to_onnx.layer_translations import layer_translations
from halfserve.export.to_onnx.operator_translations import operator_translations


def without(op_type: str, number: float) -> pattern.RewriteRule:
    """Return the rule that removes an operator whose second operand is exactly this number.

    onnxscript's own rules take 1e-8 for 0 and 1.00001 for 1: they would remove the epsilons that guard divisions.
    """

    def idle(op: Any, x: Any) -> Any:
        return getattr(op, op_type)(x, pattern.Constant(number, rel_tol=0, abs_tol=0))

    def unchanged(op: Any, x: Any, **_: Any) -> Any:
        return op.Identity(x)

    return pattern.RewriteRule(idle, unchanged, name=f"{op_type} {number}")


# onnxscript's own rules without those that compute with weights: these fold a BatchNorm in the model's dtype, which in float16
# ruins it, and drop biases that are zero.
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
    """Return the graph in ONNX, as torch's exporter makes it. Weights are still torch's tensors, not copies.

    `inputs` and `outputs` are their numbers; None for the opset of the default domain is torch's choice.

    Raises:
        ExportError: It uses an operation that torch cannot express in ONNX, or not in this version.
    """
    try:
        with silenced(), sdpa_kernel(SDPBackend.MATH):
            converted = torch.onnx.export(
                program,
                dynamo=True,
                verbose=False,
                optimize=False,
                opset_version=opset_version,
                custom_translation_table=operator_translations() | layer_translations(opset_version),
                # With the final names torch may name values inside the graph alike.
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


def simplify(model: onnx_ir.Model) -> None:
    """Fold constants, drop operations without effect, and share repeated computations; in place."""
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
    # `transpose_weights` made views of transposed weights before; the others are used twice and would be copied.
    return False if node.op_type == "Transpose" else None


def make_inside(model: onnx_ir.Model) -> None:
    """Put an Identity before each output of an If or Loop body that an outer graph computes, in place.

    ONNX wants outputs of a body made inside it. A branch such as `lambda x: x.clone()` becomes an Identity, which simplifying
    removes.
    """
    for graph in list(model.graphs()):
        for index, output in enumerate(graph.outputs):
            maker = output.producer()
            if maker is None or maker.graph is graph:  # the graph's own inputs and initializers have no producer
                continue
            copy = onnx_ir.node("Identity", inputs=[output])
            made = copy.outputs[0]
            made.name, made.type = f"{output.name}_inside", output.type
            made.shape = output.shape.copy() if output.shape is not None else None
            graph.append(copy)
            graph.outputs[index] = made


def multiply_before_transposing(model: onnx_ir.Model) -> None:
    """Turn MatMul(Transpose(x), w) into Transpose(MatMul(x, w)) in float16, where w is a matrix of weights; in place.

    The two are equal, bit by bit, when the Transpose keeps the last axis. ONNX Runtime 1.31 crashes when it fuses the first
    form in float16 with a dynamic batch (`nn.MultiheadAttention` with `batch_first`).
    """
    for node in list(model.graph):
        if node.op_type == "MatMul" and node.inputs[0] is not None and _is_matrix_of_weights(node.inputs[1]):
            transpose = node.inputs[0].producer()
            perm = _order(transpose)
            if transpose is not None and perm is not None and node.outputs[0].dtype == onnx_ir.DataType.FLOAT16:
                _swap(model, transpose, node, perm)


def _is_matrix_of_weights(value: onnx_ir.Value | None) -> bool:
    return value is not None and value.is_initializer() and value.const_value is not None and len(value.const_value.shape) == 2


def _order(node: onnx_ir.Node | None) -> tuple[int, ...] | None:
    """Return the order of a Transpose that keeps the last of three or more axes."""
    order = node.attributes.get_ints("perm") if node is not None and node.op_type == "Transpose" else None
    return tuple(order) if order and len(order) > 2 and order[-1] == len(order) - 1 else None


def _swap(model: onnx_ir.Model, transpose: onnx_ir.Node, product: onnx_ir.Node, perm: tuple[int, ...]) -> None:
    result = product.outputs[0]
    first = onnx_ir.node("MatMul", [transpose.inputs[0], product.inputs[1]], name=product.name)
    first.metadata_props.update(product.metadata_props)
    inner = first.outputs[0]
    inner.name, inner.type = f"{result.name}/before_transpose", result.type
    if result.shape is not None:
        sizes = list(result.shape)
        inner.shape = onnx_ir.Shape([sizes[perm.index(axis)] for axis in range(len(perm))])
    second = onnx_ir.node("Transpose", [inner], {"perm": list(perm)}, name=f"{product.name}/transpose")
    second.metadata_props.update(transpose.metadata_props)
    outer = second.outputs[0]
    outer.type, outer.shape = result.type, result.shape
    model.graph.insert_before(product, [first, second])
    result.replace_all_uses_with(outer, replace_graph_outputs=True)
    model.graph.remove(product, safe=True)
    outer.name = result.name
    if not transpose.outputs[0].uses() and not transpose.outputs[0].is_graph_output():
        model.graph.remove(transpose, safe=True)


def restore_output_types(model: onnx_ir.Model, results: Sequence[Tensor]) -> None:
    """Add in place the cast that torch's exporter leaves out where a float16 reduction is an output of the graph.

    A float16 sum is exported as Cast to float32, ReduceSum, Cast back; torch 2.13 omits the last cast when the sum is the
    graph's output, which then is float32. `results` are the torch model's, one tensor per output of the graph.
    """
    for index, (output, result) in enumerate(zip(model.graph.outputs, results, strict=True)):
        wanted = from_torch_dtype(result.dtype)
        if output.dtype == wanted or not result.is_floating_point():
            continue
        cast = onnx_ir.node("Cast", [output], {"to": wanted.value}, name=f"{output.name}/restore_type")
        producer = output.producer()
        if producer is not None:
            cast.metadata_props.update(producer.metadata_props)
        restored = cast.outputs[0]
        restored.name, output.name = output.name, f"{output.name}/{output.dtype.name.lower() if output.dtype else 'untyped'}"
        restored.type, restored.shape = onnx_ir.TensorType(wanted), output.shape
        model.graph.append(cast)
        model.graph.outputs[index] = restored
