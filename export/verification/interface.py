"""What a model takes and gives, as its graph declares it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper

from export.errors import ExportError
from export.verification.metrics import Array

Dim = int | str | None
FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE})


@dataclass(frozen=True, kw_only=True)
class Input:
    """One input that a caller must give.

    Attributes:
        name: Its name.
        elem_type: The type of its elements, a number of `onnx.TensorProto.DataType`.
        dims: For each dimension its size, its name, or None; None as a whole where not even the rank is declared.
    """

    name: str
    elem_type: int
    dims: tuple[Dim, ...] | None

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The type that numpy has for its elements; texts are `str_`."""
        if self.elem_type == TensorProto.STRING:
            return np.dtype(np.str_)
        return np.dtype(helper.tensor_dtype_to_np_dtype(self.elem_type))

    @property
    def floating(self) -> bool:
        """Whether any of numpy's floating-point types may be given: it is cast to the model's."""
        return self.elem_type in FLOATS

    def __str__(self) -> str:
        dims = "of any rank" if self.dims is None else f"[{', '.join(str(dim or '?') for dim in self.dims)}]"
        return f"{TensorProto.DataType.Name(self.elem_type).lower()} {dims}"

    def misfit(self, array: Array) -> str | None:
        """What is wrong with an array for this input, in words; None when it fits."""
        given = f"{array.dtype} {list(array.shape)}"
        if self.floating != np.issubdtype(array.dtype, np.floating) or not (self.floating or self._same_kind(array)):
            return f"input {self.name!r}: expected {self}, got {given}"
        if self.dims is None:
            return None
        sizes = zip(self.dims, array.shape, strict=False)
        if len(self.dims) != array.ndim or any(isinstance(dim, int) and dim != size for dim, size in sizes):
            return f"input {self.name!r}: expected {self}, got {given}"
        return None

    def _same_kind(self, array: Array) -> bool:
        return array.dtype.kind == "U" if self.elem_type == TensorProto.STRING else bool(array.dtype == self.dtype)


def inputs_of(model: onnx.ModelProto) -> list[Input]:
    """The inputs that a caller must give: those that no initializer has a value for.

    Raises:
        ExportError: One is no tensor, or of no type.
    """
    initialized = {tensor.name for tensor in model.graph.initializer}
    return [_input(value) for value in model.graph.input if value.name not in initialized]


def _input(value: onnx.ValueInfoProto) -> Input:
    kind = value.type.WhichOneof("value")
    if kind == "optional_type" and value.type.optional_type.elem_type.WhichOneof("value") == "tensor_type":
        tensor = value.type.optional_type.elem_type.tensor_type
    elif kind == "tensor_type":
        tensor = value.type.tensor_type
    else:
        raise ExportError(
            f"input {value.name!r} is a {(kind or 'value of no type').removesuffix('_type')}; only tensors can be sampled"
        )
    if tensor.elem_type not in TensorProto.DataType.values() or tensor.elem_type == TensorProto.UNDEFINED:
        raise ExportError(f"input {value.name!r} is a tensor of no known type; export the model again")
    dims = tuple(_dim(dim) for dim in tensor.shape.dim) if tensor.HasField("shape") else None
    return Input(name=value.name, elem_type=tensor.elem_type, dims=dims)


def _dim(dim: onnx.TensorShapeProto.Dimension) -> Dim:
    if dim.HasField("dim_value") and dim.dim_value >= 0:  # -1 is how some converters write an unknown size
        return int(dim.dim_value)
    return dim.dim_param or None
