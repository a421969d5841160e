"""Sparse weights as dense ones: the form that checkers, runtimes and this converter work on."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx
from onnx import numpy_helper

from export.errors import ExportError
from export.files.proto_walk import all_graphs, all_nodes


def densify(model: onnx.ModelProto) -> None:
    """Write sparse initializers and sparse constants as dense ones, in place.

    ONNX's own inference has no operator that takes a sparse tensor, and ONNX Runtime makes them dense when it loads a model.

    Raises:
        ExportError: A sparse tensor's indices do not fit its shape, or its numbers lie in a data file.
    """
    for graph in all_graphs(model):
        graph.initializer.extend(_dense(sparse) for sparse in graph.sparse_initializer)
        del graph.sparse_initializer[:]
    for node in all_nodes(model):
        _densify_attributes(node.attribute)


def _densify_attributes(attributes: Iterable[onnx.AttributeProto]) -> None:
    for attribute in attributes:
        if attribute.type == onnx.AttributeProto.SPARSE_TENSOR and attribute.name == "sparse_value":
            dense = _dense(attribute.sparse_tensor)
            attribute.Clear()
            attribute.name, attribute.type = "value", onnx.AttributeProto.TENSOR
            attribute.t.CopyFrom(dense)


def _dense(sparse: onnx.SparseTensorProto) -> onnx.TensorProto:
    if any(part.data_location == onnx.TensorProto.EXTERNAL for part in (sparse.values, sparse.indices)):
        raise ExportError(
            f"sparse tensor {sparse.values.name!r} lies in a data file, expected it in the model: save the model in one file"
        )
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
