"""Numbers in the source that float16 cannot hold: masks beyond its range, epsilons under it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from export.leaks.log import Log
from export.leaks.operation import HALF, WIDE, Operation, results_of
from export.weight_ledger import FP16_LARGEST_FLUSHED, FP16_MAX, FP16_SMALLEST_NORMAL

FP16_FIRST_INFINITE = 65520.0  # halfway to the number that would follow 65504; from here on rounding gives infinity
NOTABLE_ERROR = 0.01  # 1e-5 is subnormal too and off by 0.1 %, which no epsilon minds

FILLS = frozenset({"fill_", "fill", "full", "full_like", "new_full", "masked_fill", "masked_fill_", "where", "constant_pad_nd"})
SUMS = frozenset({"add", "add_", "sub", "sub_", "rsub"})
BOUNDS = frozenset(
    {"clamp", "clamp_", "clamp_min", "clamp_min_", "clamp_max", "clamp_max_", "maximum", "minimum", "nan_to_num"}
)
SCALES = frozenset({"mul", "mul_", "div", "div_", "true_divide", "reciprocal"})
WATCHED = FILLS | SUMS | BOUNDS | SCALES | {"scalar_tensor"}


@dataclass
class Constants:
    """Looks at the numbers that operations on float16 tensors are given.

    Attributes:
        log: Where findings go.
    """

    log: Log
    _scalars: Any = field(default_factory=WeakTensorKeyDictionary)

    def before(self, operation: Operation) -> bool:
        """Log the constants that do not fit.

        Returns:
            Whether one of them is beyond float16's range, so that the kernel may refuse it.
        """
        if operation.name not in WATCHED or not _is_half(operation):
            return False
        judged = [self._judge(operation, number) for number in self._numbers(operation)]
        return any(judged)

    def beyond_wide(self, operation: Operation) -> list[float]:
        """The finite numbers beyond float16's range that an operation writes into a tensor that is no float16 one."""
        if operation.name not in FILLS | SCALES or _is_half(operation):
            return []
        return [number for number in self._numbers(operation) if FP16_FIRST_INFINITE <= abs(number) < math.inf]

    def after(self, operation: Operation, result: Any) -> None:
        """Remember tensors that are nothing but a number (`torch.tensor(1e-8)`), and masks that turn infinite when rounded."""
        for made in results_of(result):
            if made.dtype in WIDE and not made.dim() and not made.is_complex() and not _computed(operation):
                self._scalars[made] = float(made)
            if operation.name == "_to_copy" and made.dtype == HALF:
                self._check_rounding(operation, operation.tensors[0], made)

    def _numbers(self, operation: Operation) -> Iterator[float]:
        for value in (
            *operation.args,
            *(operation.kwargs.get(name) for name in ("min", "max", "value", "nan", "posinf", "neginf")),
        ):
            if isinstance(value, Tensor) and value in self._scalars:
                yield self._scalars[value]
            elif isinstance(value, int | float) and not isinstance(value, bool):
                yield float(value)

    def _judge(self, operation: Operation, number: float) -> bool:
        size = abs(number)
        if math.isinf(number):
            if number < 0 and operation.name in FILLS and operation.place is not None:
                text = "-inf hides, but a row that is hidden whole is NaN after softmax, and so is 0 * -inf"
                self.log.add("infinite_mask", "note", operation.place, operation.module, text, "mask_value(x)")
            return False
        if size >= FP16_FIRST_INFINITE:
            self._log(operation, "constant", "error", _beyond(operation, number), _fix_beyond(operation, number))
            return True
        if 0 < size < FP16_SMALLEST_NORMAL:
            self._judge_small(operation, number)
        return False

    def _judge_small(self, operation: Operation, number: float) -> None:
        held = float(torch.tensor(number, dtype=torch.float64).half())
        fix = "finfo(x).tiny" if operation.name in SUMS | BOUNDS | FILLS else "rescale"
        if abs(number) <= FP16_LARGEST_FLUSHED:
            text = f"{number:g} is 0 in float16 (nothing between 0 and 6e-08): {_consequence(operation)}"
            self._log(operation, "epsilon", "error", text, fix)
            return
        off = abs(held - number) / abs(number)
        severity = "warning" if off > NOTABLE_ERROR else "note"
        text = f"{number:g} is subnormal in float16: {held:g}, off by {off:.2%}, and 0 where subnormals are flushed"
        self._log(operation, "epsilon", severity, text, fix)

    def _check_rounding(self, operation: Operation, wide: Tensor, made: Tensor) -> None:
        if wide.dtype == HALF or not wide.is_floating_point():
            return
        lost = wide.isfinite() & made.isinf()
        if lost.any():
            worst = wide[lost].abs().max().item()
            sign = "-" if bool((wide[lost] < 0).all()) else ""
            fix = "mask_value(x)" if sign else "rescale"
            text = (
                f"{int(lost.sum())} of {wide.numel()} values, up to {sign}{worst:g}, become {sign}inf when rounded to float16"
            )
            self._log(operation, "constant", "error", text, fix)

    def _log(self, operation: Operation, kind: str, severity: Any, text: str, fix: str) -> None:
        self.log.add(kind, severity, operation.place, operation.module, text, fix)


def _is_half(operation: Operation) -> bool:
    if operation.kwargs.get("dtype") == HALF:
        return True
    values = [t for t in operation.tensors if t.dtype in WIDE and t.dim()]
    return not values and any(tensor.dtype == HALF for tensor in operation.tensors)


def _computed(operation: Operation) -> bool:
    return bool(operation.tensors) and operation.name not in ("lift_fresh", "detach", "clone")


def _beyond(operation: Operation, number: float) -> str:
    infinite = "-inf" if number < 0 else "inf"
    if operation.name in FILLS:
        return (
            f"{number:g} does not fit float16 (largest 65504): torch refuses to write it, an exported graph writes {infinite}"
        )
    if operation.name in SCALES:
        return (
            f"{number:g} is {infinite} in a float16 graph (largest {FP16_MAX:g}), and 0 * {infinite} is NaN where eager gives 0"
        )
    return f"{number:g} is {infinite} in float16 (largest {FP16_MAX:g})"


def _fix_beyond(operation: Operation, number: float) -> str:
    if operation.name in FILLS | SUMS or (number < 0 and operation.name in SCALES):
        return "mask_value(x)"
    return "finfo(x).max" if operation.name in BOUNDS else "rescale"


def _consequence(operation: Operation) -> str:
    if operation.name in SCALES:
        return "x * it is 0, x / it is inf or NaN"
    return "a division, log or rsqrt behind it gives inf or NaN where the tensor is 0"
