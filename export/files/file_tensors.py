"""Tensors that are read from their files one at a time, and never kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir

from export.errors import ExportError


class FileTensor(onnx_ir.ExternalTensor):
    """An external tensor that maps its own bytes whenever it is read, and keeps nothing.

    onnx_ir's own maps the whole file and holds the map until it is told to release it, so that reading a model tensor by tensor
    ends with all of it in memory.
    """

    __slots__ = ()

    def numpy(self) -> np.ndarray[Any, Any]:
        """The tensor, mapped; the memory is given back with the array.

        Raises:
            ExportError: The file is gone or shorter than it was.
        """
        dtype = self.dtype.numpy()
        if self.dtype.bitwidth < 8:  # several elements share a byte: onnx_ir unpacks them
            return super().numpy()
        if self.size == 0:
            return np.empty(self.shape.numpy(), dtype)
        try:
            mapped = np.memmap(self.path, dtype, "r", self.offset or 0, self.shape.numpy())
        except (OSError, ValueError) as error:
            raise ExportError(f"cannot read tensor {self.name!r} from {self.path}: {error}") from error
        return np.asarray(mapped)

    def __array__(self, dtype: Any = None) -> np.ndarray[Any, Any]:
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    def tobytes(self) -> bytes:
        """A copy of the bytes."""
        return self.numpy().tobytes() if self.dtype.bitwidth >= 8 else super().tobytes()


def map_tensors(model: onnx_ir.Model, folder: Path) -> None:
    """Make a `FileTensor` with an absolute path of every external tensor of a model in `folder`, in place."""
    for graph in model.graphs():
        for value in graph.initializers.values():
            if isinstance(value.const_value, onnx_ir.ExternalTensor):
                value.const_value = _mapped(value.const_value, folder)
    for node in onnx_ir.traversal.RecursiveGraphIterator(model.graph):
        _map_attributes(node, folder)
    for function in model.functions.values():
        for node in onnx_ir.traversal.RecursiveGraphIterator(function):
            _map_attributes(node, folder)


def _map_attributes(node: onnx_ir.Node, folder: Path) -> None:
    for name, attribute in list(node.attributes.items()):
        if attribute.is_ref():
            continue
        value: Any = attribute.value
        if attribute.type == onnx_ir.AttributeType.TENSOR and isinstance(value, onnx_ir.ExternalTensor):
            node.attributes[name] = onnx_ir.AttrTensor(name, _mapped(value, folder), attribute.doc_string)
        elif attribute.type == onnx_ir.AttributeType.TENSORS:
            tensors = [_mapped(t, folder) if isinstance(t, onnx_ir.ExternalTensor) else t for t in value]
            node.attributes[name] = onnx_ir.AttrTensors(name, tensors, attribute.doc_string)


def _mapped(tensor: onnx_ir.ExternalTensor, folder: Path) -> FileTensor:
    return FileTensor(
        str(folder / tensor.location),
        tensor.offset,
        tensor.nbytes,
        tensor.dtype,
        shape=tensor.shape,
        name=tensor.name,
        doc_string=tensor.doc_string,
        metadata_props=dict(tensor.metadata_props),
    )
