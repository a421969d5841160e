"""Sparse weights as dense ones: the form that checkers, runtimes and this converter work on."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx
from onnx import numpy_helper

from export.errors import ExportError
from export.proto_walk import all_graphs, all_nodes


def densify(model: onnx.ModelProto) -> bool:
    """Write sparse initializers and sparse constants as dense ones, in place.

    ONNX's own inference has no operator that takes a sparse tensor, and ONNX Runtime makes them dense when it loads a model.

    Returns:
        Whether there were any.

    Raises:
        ExportError: A sparse tensor's indices do not fit its shape.
    """
    found = False
    for graph in all_graphs(model):
        for sparse in graph.sparse_initializer:
            graph.initializer.append(_dense(sparse))
            found = True
        del graph.sparse_initializer[:]
    for node in all_nodes(model):
        found |= _densify_attributes(node.attribute)
    return found


def _densify_attributes(attributes: Iterable[onnx.AttributeProto]) -> bool:
    found = False
    for attribute in attributes:
        if attribute.type == onnx.AttributeProto.SPARSE_TENSOR and attribute.name == "sparse_value":
            dense = _dense(attribute.sparse_tensor)
            attribute.Clear()
            attribute.name, attribute.type = "value", onnx.AttributeProto.TENSOR
            attribute.t.CopyFrom(dense)
            found = True
    return found


def _dense(sparse: onnx.SparseTensorProto) -> onnx.TensorProto:
    values, indices, shape = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices), tuple(sparse.dims)
    dense = np.zeros(shape, values.dtype)
    try:
        if indices.ndim == 1:
            dense.reshape(-1)[indices] = values
        else:
            dense[tuple(indices.T)] = values
    except (IndexError, ValueError) as error:
        raise ExportError(
            f"sparse tensor {sparse.values.name!r}: its indices do not fit shape {list(shape)}; export the model again"
        ) from error
    return numpy_helper.from_array(dense, sparse.values.name)
