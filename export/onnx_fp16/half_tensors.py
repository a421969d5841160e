"""Weights as float16: what rounding does to them, counted; the rounding itself, at once or when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import onnx_ir

from export.onnx_fp16.graph_walk import FLOAT, FLOAT16
from export.weight_ledger import FP16_MAX, Ledger, ledger_of

Array: TypeAlias = np.ndarray[Any, Any]
_CHUNK_ELEMENTS = 1 << 19  # 2 MB of float32


@dataclass(frozen=True, kw_only=True)
class WeightScan:
    """What is known of a weight after one look at each element.

    Attributes:
        elements: How many there are.
        ledger: What rounding does.
        nonzero: Elements that are not zero.
        largest: The largest finite magnitude; 0 where there is none.
    """

    elements: int
    ledger: Ledger
    nonzero: int
    largest: float

    @property
    def overflows(self) -> bool:
        """Some finite element is beyond float16's range."""
        return self.ledger.overflow > 0

    @property
    def vanishes(self) -> bool:
        """All that is not zero becomes zero."""
        return 0 < self.nonzero == self.ledger.flushed


def scan(tensor: onnx_ir.TensorProtocol) -> WeightScan:
    """Look at each element of a float32 tensor, a few megabytes at a time."""
    total, nonzero, largest = Ledger(), 0, 0.0
    for chunk in _chunks(tensor.numpy()):
        magnitude = np.abs(chunk)
        positive = magnitude[magnitude > 0]  # NaN is not
        finite = positive[np.isfinite(positive)]
        nonzero += positive.size + int(np.isnan(magnitude).sum())
        largest = max(largest, float(finite.max(initial=0.0)))
        total += ledger_of(chunk)
    return WeightScan(elements=tensor.size, ledger=total, nonzero=nonzero, largest=largest)


def halved(tensor: onnx_ir.TensorProtocol, *, saturate: bool) -> onnx_ir.TensorProtocol:
    """The tensor in float16. One that lies in a file is read and rounded whenever it is asked for, and never kept.

    Args:
        tensor: A float32 tensor.
        saturate: Whether finite values beyond float16's range become its largest number, instead of infinity.
    """
    return _changed(tensor, partial(rounded, saturate=saturate), FLOAT16)


def narrowed(tensor: onnx_ir.TensorProtocol) -> onnx_ir.TensorProtocol:
    """A float64 tensor in float32; one that lies in a file is read whenever it is asked for, and never kept.

    What is finite stays so, and what is not zero stays so: a mask of -1.8e308 is no infinity, an epsilon of 1e-300 no zero.
    """
    return _changed(tensor, _single, FLOAT)


def _single(values: Array) -> Array:
    limit, least = np.finfo(np.float32).max, np.finfo(np.float32).smallest_subnormal
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        result = np.asarray(values).astype(np.float32)
    result = np.where(np.isinf(result) & np.isfinite(values), np.copysign(limit, result), result)
    return np.where((result == 0) & (values != 0), np.copysign(least, result), result)


def _changed(
    tensor: onnx_ir.TensorProtocol, change: Callable[[Array], Array], dtype: onnx_ir.DataType
) -> onnx_ir.TensorProtocol:
    if isinstance(tensor, onnx_ir.ExternalTensor | onnx_ir.LazyTensor):
        return onnx_ir.LazyTensor(
            partial(_changed_now, tensor, change, dtype),
            dtype=dtype,
            shape=onnx_ir.Shape(tensor.shape.numpy()),
            cache=False,
            name=tensor.name,
            doc_string=tensor.doc_string,
            metadata_props=dict(tensor.metadata_props),
        )
    return _changed_now(tensor, change, dtype)


def _changed_now(
    tensor: onnx_ir.TensorProtocol, change: Callable[[Array], Array], dtype: onnx_ir.DataType
) -> onnx_ir.TensorProtocol:
    return onnx_ir.Tensor(
        change(tensor.numpy()),
        dtype=dtype,
        name=tensor.name,
        doc_string=tensor.doc_string,
        metadata_props=dict(tensor.metadata_props),
    )


def rounded(values: Array, *, saturate: bool = False) -> Array:
    """float32 numbers as the nearest float16 ones, ties to even."""
    if saturate:
        values = np.where(np.isfinite(values), np.clip(values, -FP16_MAX, FP16_MAX), values)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.asarray(values).astype(np.float16)


def _chunks(values: Array) -> Iterator[Array]:
    flat = np.ravel(values)
    for start in range(0, flat.size, _CHUNK_ELEMENTS):
        yield flat[start : start + _CHUNK_ELEMENTS]
