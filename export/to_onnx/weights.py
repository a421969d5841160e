"""A model's weights under their own names, laid out as its operators read them."""

from __future__ import annotations

from collections import defaultdict

import onnx_ir
import torch
from onnx_ir.tensor_adapters import TorchTensor

from export.to_onnx.capture import WRAPPED


def name_weights(model: onnx_ir.Model) -> None:
    """Give the initializers the names that the parameters have in the module, in place."""
    taken = {value.name for node in model.graph.all_nodes() for value in node.outputs} | set(model.graph.initializers)
    for value in list(model.graph.initializers.values()):
        name = (value.name or "").removeprefix(f"{WRAPPED}.")
        if name == value.name:
            continue
        while name in taken:
            name = f"{name}_weight"
        taken.add(name)
        value.name = name


def transpose_weights(model: onnx_ir.Model) -> None:
    """Replace transposed weights by weights that lie in memory transposed, in place: as views, so that nothing is copied.

    A weight that is read in another way too (an embedding tied to the last layer) is left alone, and so is its Transpose: it
    would be stored twice.
    """
    for value in list(model.graph.initializers.values()):
        by_order = defaultdict(list)
        for use in value.uses():
            order = use.node.attributes.get_ints("perm") if use.node.op_type == "Transpose" else None
            by_order[tuple(order) if order is not None else None].append(use.node)
        order = next(iter(by_order), None)
        shown = any(node.outputs[0].is_graph_output() for nodes in by_order.values() for node in nodes)
        tensor = getattr(value.const_value, "raw", None)
        if len(by_order) == 1 and order is not None and isinstance(tensor, torch.Tensor) and not shown:
            _replace(model, value, by_order[order], tensor.detach().permute(order))


def _replace(model: onnx_ir.Model, value: onnx_ir.Value, nodes: list[onnx_ir.Node], tensor: torch.Tensor) -> None:
    name = value.name or ""
    stored = onnx_ir.Value(name=name, type=value.type, shape=onnx_ir.Shape(tensor.shape))
    stored.const_value = TorchTensor(tensor, name=name)
    for node in nodes:
        node.outputs[0].replace_all_uses_with(stored, replace_graph_outputs=False)
        if node.graph is not None:
            node.graph.remove(node, safe=True)
    model.graph.initializers.pop(name)
    model.graph.register_initializer(stored)
