"""Choice of the half-precision type for a model if the user leaves it open (`--dtype auto`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
import onnx_ir

from halfserve.export.certificate.certificate import BudgetExceeded, OutputVerdict
from halfserve.export.half_types import HalfName
from halfserve.export.onnx_files.model_file import ModelFile

BFLOAT16_WEIGHTS = "the weights are bfloat16 numbers, so bfloat16 was tried first"
MOST = 0.9  # fraction of the elements; folded constants may be others
_CHUNK_ELEMENTS = 1 << 19
_LOW_BITS = np.uint32(0xFFFF)  # mask of the bits of a float32 number that are 0 in every bfloat16 number


def holds_bfloat16_weights(model: ModelFile) -> bool:
    """Whether rounding a float32 model's matrices to bfloat16 changes hardly any: they were stored or trained in bfloat16."""
    exact = total = 0
    for tensor in _matrices(model):
        total += tensor.size
        exact += tensor.size if _is_exact(tensor) else 0
    return total > 0 and exact >= MOST * total


def nearest_to_budget(over: Mapping[HalfName, BudgetExceeded]) -> HalfName:
    """The type whose outputs exceed their limits by the smallest factor; NaN and infinities count as infinite."""
    return min(over, key=lambda dtype: _excess(over[dtype]))


def notes_on_rejected(over: Mapping[HalfName, BudgetExceeded]) -> Iterator[str]:
    """A note on each type that was tried before."""
    return (f"{dtype} alone is over budget: {error.violation}" for dtype, error in over.items())


def _matrices(model: ModelFile) -> Iterator[onnx_ir.TensorProtocol]:
    for value in model.to_ir().graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and tensor.dtype == onnx_ir.DataType.FLOAT and len(tensor.shape.numpy()) > 1:
            yield tensor


def _is_exact(tensor: onnx_ir.TensorProtocol) -> bool:
    bits = np.ravel(tensor.numpy()).view(np.uint32)
    starts = range(0, bits.size, _CHUNK_ELEMENTS)
    return not any((bits[start : start + _CHUNK_ELEMENTS] & _LOW_BITS).any() for start in starts)


def _excess(error: BudgetExceeded) -> float:
    certificate = error.certificate
    return max((_share(verdict, certificate.budget.max_scaled_error) for verdict in certificate.outputs), default=math.inf)


def _share(verdict: OutputVerdict, limit: float) -> float:
    figures = verdict.figures
    if figures.non_finite or not math.isfinite(figures.max_scaled_error):
        return math.inf
    return figures.max_scaled_error / limit if limit else math.inf
