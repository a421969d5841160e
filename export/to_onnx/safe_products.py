"""A float16 product that ONNX Runtime survives."""

from __future__ import annotations

import onnx_ir


def multiply_before_transposing(model: onnx_ir.Model) -> None:
    """Turn MatMul(Transpose(x), w) into Transpose(MatMul(x, w)) in float16, where w is a matrix of weights; in place.

    The two are equal, bit by bit, when the Transpose leaves the last axis in its place. ONNX Runtime 1.31 ends the process when
    it fuses the first form in float16 with a batch of any size, as `nn.MultiheadAttention` with `batch_first` begins.
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
    """The order of a Transpose that leaves the last of three or more axes in its place."""
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
