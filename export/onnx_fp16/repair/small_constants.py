"""Constants as a graph hands them on: an epsilon behind an Identity, a Cast or an Expand is one still."""

from __future__ import annotations

import numpy as np
import onnx_ir

from export.onnx_fp16.graph_walk import constant_of
from export.onnx_fp16.planning.op_sets import MOVERS
from export.onnx_fp16.repair.edits import is_op

MOST_PRODUCTS = 4
THROUGH = MOVERS | {"Cast", "CastLike"}  # of their first input


def constant_path(value: onnx_ir.Value | None, products: int = MOST_PRODUCTS) -> tuple[float, tuple[onnx_ir.Node, ...]] | None:
    """The largest magnitude in a float constant, and the nodes that hand it on; None for what is no constant.

    It may be the product of constants, `products` deep.
    """
    path: list[onnx_ir.Node] = []
    while value is not None:
        tensor = constant_of(value)
        maker = value.producer()
        if maker is not None and is_op(maker, "ConstantOfShape"):
            attribute = maker.attributes.get("value")
            tensor = attribute.as_tensor() if attribute is not None else None
            path.append(maker)
        if tensor is not None:
            return (_largest(tensor), tuple(path)) if tensor.dtype.is_floating_point() and tensor.size else None
        if maker is None or not is_op(maker, *THROUGH) or is_op(maker, "Concat"):
            product = _product(maker, products) if maker is not None and products else None
            return None if product is None else (product[0], (*path, *product[1]))
        path.append(maker)
        value = maker.inputs[0]
    return None


def _product(node: onnx_ir.Node, products: int) -> tuple[float, tuple[onnx_ir.Node, ...]] | None:
    """The same for the product of two constants."""
    if not is_op(node, "Mul"):
        return None
    sides = [constant_path(value, products - 1) for value in node.inputs]
    known = [side for side in sides if side is not None]
    if len(known) != len(sides):
        return None
    return float(np.prod([size for size, _ in known])), (node, *(one for _, path in known for one in path))


def _largest(tensor: onnx_ir.TensorProtocol) -> float:
    return float(np.abs(tensor.numpy().astype(np.float64)).max())
