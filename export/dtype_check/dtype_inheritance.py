"""Tensors made inside `forward` that take dtype and device from a tensor already there.

A bare `torch.zeros(n)` is float32 in a model of any dtype: in a half model it promotes everything after it to float32, or
fails on a dtype mismatch. The helpers here take the tensor to inherit from first, so one model source is right in float32,
bfloat16 and float16, in eager mode and under `torch.export` or `torch.onnx.export(dynamo=True)`, with dynamic sizes. Sizes
and numbers may be symbolic wherever they are annotated `int` or `float`, as in torch's own signatures.

Ranges are counted in integers and rounded once: counting in float16 is exact up to 2048 only. A finite number that the
inherited dtype cannot hold is an error, not a silent infinity.

Only torch is imported: models import this module.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from torch import Tensor


__all__ = [
    "causal_mask",
    "finfo",
    "mask_value",
    "new_arange",
    "new_empty",
    "new_eye",
    "new_full",
    "new_linspace",
    "new_ones",
    "new_tensor",
    "new_zeros",
]


class Like(Protocol):
    """A tensor, or another object with a dtype and a device."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...


def new_zeros(x: Tensor, *shape: int | Sequence[int]) -> Tensor:
    """Zeros of the given shape, in the dtype and on the device of `x`.

    Args:
        x: The tensor to inherit from.
        *shape: ints, as `new_zeros(x, 2, 3)` or `new_zeros(x, (2, 3))`; they may be symbolic.
    """
    return x.new_zeros(_sizes(shape))


def new_ones(x: Tensor, *shape: int | Sequence[int]) -> Tensor:
    """Ones of the given shape, in the dtype and on the device of `x` (see `new_zeros`)."""
    return x.new_ones(_sizes(shape))


def new_empty(x: Tensor, *shape: int | Sequence[int]) -> Tensor:
    """Return an uninitialised tensor of the given shape, in the dtype and on the device of `x` (see `new_zeros`)."""
    return x.new_empty(_sizes(shape))


def new_full(x: Tensor, shape: int | Sequence[int], value: float) -> Tensor:
    """Return a tensor of the given shape filled with `value`, in the dtype and on the device of `x`.

    Raises:
        ValueError: `value` is finite and the dtype of `x` cannot hold it (1e9 in float16).
    """
    require_representable(x, value, "new_full")
    return x.new_full(_sizes((shape,)), value)


def new_tensor(x: Tensor, data: Any) -> Tensor:
    """Return `data` (numbers, nested lists of them, or an array) as a tensor in the dtype and on the device of `x`.

    A tensor is converted as `data.to(x)` does, with gradients and symbolic shapes.

    Raises:
        ValueError: A finite number in `data` does not fit the dtype of `x`.
    """
    if isinstance(data, torch.Tensor):
        return data.to(x)
    for number in numbers_in(data):
        require_representable(x, number, "new_tensor")
    return x.new_tensor(data)


def new_arange(x: Like, start: float, end: float | None = None, step: float = 1) -> Tensor:
    """`torch.arange` in the dtype and on the device of `x`; shape `(ceil((end - start) / step),)`.

    Integer arguments are counted in int64 and cast once, so every value is the float nearest to the true one (above 2048,
    float16 itself holds only every second integer). Otherwise the places are counted in int64 and the values computed from them
    in float32 (float64 when `x` is), because a runtime that adds up the step, as ONNX's Range may, drifts.

    Args:
        x: The tensor to inherit from.
        start: First value; with `end` left out it is the end, and the range starts at 0.
        end: The range stops before this value.
        step: Distance between values; not 0.

    Raises:
        ValueError: `step` is 0, or a value of the range does not fit the dtype of `x`.
    """
    if end is None:
        start, end = 0, start
    if _is_plain(step) and step == 0:
        raise ValueError("new_arange: step is 0; expected the distance between two values")
    require_representable(x, start, "new_arange")
    if all(isinstance(number, int | torch.SymInt) for number in (start, end, step)):
        values = torch.arange(start, end, step, dtype=torch.int64, device=x.device)
    else:
        index = torch.arange(math.ceil((end - start) / step), dtype=torch.int64, device=x.device)
        values = start + index.to(_wide(x)) * step
    if _is_plain(values.shape[0]) and values.shape[0]:
        require_representable(x, start + step * (values.shape[0] - 1), "new_arange")
    return values.to(x.dtype)


def new_linspace(x: Like, start: float, end: float, steps: int) -> Tensor:
    """Return `steps` evenly spaced values, `start` and `end` included, in the dtype and on the device of `x`; shape `(steps,)`.

    Built from a range: `torch.linspace` makes the exporter silently freeze a dynamic `steps` at the example's size. Each
    half is measured from its own end, so that the first and the last value are exact. Computed in float32 (float64 when `x` is)
    and rounded once.

    Raises:
        ValueError: `start` or `end` is finite and does not fit the dtype of `x`.
    """
    require_representable(x, start, "new_linspace")
    require_representable(x, end, "new_linspace")
    wide = _wide(x)
    index = torch.arange(steps, dtype=torch.int64, device=x.device)
    # Dynamo traces `max` of any size; torch 2.11's fails on sym_max of a size that it specialized to a constant.
    largest: Any = max if isinstance(steps, int) else torch.sym_max
    last = largest(steps - 1, 1)
    # Multiplied, then divided, both on tensors: a quotient of Python's numbers would be float64 here and float32 in the graph.
    from_start = start + index.to(wide) * (end - start) / last
    from_end = end - (steps - 1 - index).to(wide) * (end - start) / last
    return torch.where(index * 2 < steps, from_start, from_end).to(x.dtype)


def new_eye(x: Tensor, n: int, m: int | None = None) -> Tensor:
    """Return the `(n, m)` matrix with ones on its diagonal (`m` defaults to `n`), in the dtype and on the device of `x`."""
    return torch.eye(n, n if m is None else m, dtype=x.dtype, device=x.device)


def finfo(x: Tensor) -> torch.finfo:
    """Return the limits of the dtype of `x`.

    Raises:
        TypeError: `x` is not a floating tensor.
    """
    if not x.is_floating_point():
        raise TypeError(f"finfo: expected a floating tensor to take limits from, got {x.dtype}; pass the scores, not the mask")
    return torch.finfo(x.dtype)


def mask_value(x: Tensor) -> float:
    """Return the most negative finite number of the dtype of `x`: the value of hidden positions in attention scores.

    Use it with `masked_fill`, or add it to scores: it is finite, so a fully masked row gives even weights instead of NaN, and
    `0 * mask_value(x)` is 0. A constant such as -1e9 is -inf in float16.

    Raises:
        TypeError: `x` is not a floating tensor.
    """
    return finfo(x).min


def causal_mask(x: Tensor, n: int) -> Tensor:
    """Return the additive `(n, n)` mask that lets position i see positions 0..i: 0 there, `mask_value(x)` above the diagonal.

    Raises:
        TypeError: `x` is not a floating tensor.
    """
    return x.new_full((n, n), mask_value(x)).triu(1)


def _sizes(shape: tuple[int | Sequence[int], ...]) -> Any:
    if len(shape) == 1 and not isinstance(shape[0], int | torch.SymInt):
        return tuple(shape[0])
    return shape


def _wide(x: Like) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _is_plain(number: float) -> bool:
    return isinstance(number, int | float)


def numbers_in(data: Any) -> Iterable[int | float]:
    """Yield the numbers in nested lists and tuples, or in an array; other values are skipped."""
    if isinstance(data, int | float):
        yield data
    elif isinstance(data, list | tuple):
        for item in data:
            yield from numbers_in(item)
    elif hasattr(data, "tolist"):
        yield from numbers_in(data.tolist())


def require_representable(x: Like, number: float, helper: str) -> None:
    """Raise ValueError for a finite number that the dtype of `x` would turn into an infinity; symbolic numbers pass."""
    if not _is_plain(number) or not x.dtype.is_floating_point or not math.isfinite(number):
        return
    limit = torch.finfo(x.dtype).max
    if abs(number) > limit:
        raise ValueError(f"{helper}: {number:g} does not fit {x.dtype} (largest value {limit:g}); use mask_value(x) or rescale")
