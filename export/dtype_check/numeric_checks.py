"""Numeric failures of half-precision arithmetic: overflow, positions beyond 2048 or 256, sums of squares."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from halfserve.export.dtype_check.findings import FindingLog, Key
from halfserve.export.dtype_check.source_lines import SourceLine
from halfserve.export.dtype_check.watched_run import Operation, results_of

# These return, beside the result, what the backward pass needs: 1 / deviation is infinite for a constant row.
SAVING = ("native_", "_native", "_batch_norm", "_fused", "_scaled_dot_product", "cudnn")
UNDEFINED = ("empty", "new_empty", "_to_copy", "copy_", "_empty")

SQUARES_LIMIT = 256  # 256**2 is 65536, over float16's range

# Keep values: what holds of their argument holds of their result.
SHAPES = frozenset(
    {"_unsafe_view", "alias", "clone", "detach", "expand", "permute", "squeeze", "t", "transpose", "unsqueeze", "view"}
)
# Angles are positions times frequencies, computed by these. A sum with something else is no angle.
CARRIERS = frozenset({
    "_to_copy", "_unsafe_view", "alias", "bmm", "cat", "clone", "detach", "div", "expand", "mm", "mul", "permute",
    "repeat", "reshape", "select", "slice", "stack", "t", "transpose", "unsqueeze", "view",
})  # fmt: skip


@dataclass
class OverflowCheck:
    """Finds the operations that make the first infinity or NaN.

    Attributes:
        log: Receives findings; None for the float32 run, which shows which lines make infinities in float32 too.
        expected: Those lines.
    """

    log: FindingLog | None = None
    expected: set[SourceLine | None] = field(default_factory=set)
    _was_finite: bool = True

    def before(self, operation: Operation) -> None:
        """Inspect the arguments that an in-place operation is about to overwrite."""
        if operation.in_place:
            self._was_finite = all(_finite(tensor) for tensor in operation.tensors)

    def after(self, operation: Operation, result: Any, *, excused: bool = False) -> None:
        """Check an operation's results; `excused` where a constant in it is known not to fit."""
        made_here = results_of(result)[:1] if operation.name.startswith(SAVING) else results_of(result)
        infinite = [made for made in made_here if made.is_floating_point() and not _finite(made)]
        if not infinite:
            return
        finite = self._was_finite if operation.in_place else all(_finite(tensor) for tensor in operation.tensors)
        if not finite or excused or operation.name.startswith(UNDEFINED) or _has_infinity(operation):
            return
        if self.log is None:
            self.expected.add(operation.place)
        elif operation.place not in self.expected and infinite[0].dtype == operation.dtype:
            name = operation.call.name if operation.call else operation.name
            half = operation.half
            count = f"{int((~infinite[0].isfinite()).sum())} of {infinite[0].numel()} values"
            true = _largest_in_float32(operation)
            if true is None:
                text = f"{name} gives inf or NaN from finite {half.name} numbers ({count})"
            else:
                text = f"{name} reaches {true:.4g} and {half.name} ends at {half.largest:g}: {count} become inf"
            self.log.add("overflow", "error", operation.place, operation.module, text, ".float()")


def _finite(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex()) or bool(tensor.isfinite().all())


def _has_infinity(operation: Operation) -> bool:
    numbers = (leaf for leaf in pytree.tree_leaves((operation.args, operation.kwargs)) if isinstance(leaf, float))
    return any(number in (float("inf"), float("-inf")) or number != number for number in numbers)  # noqa: PLR0124  (NaN)


def _largest_in_float32(operation: Operation) -> float | None:
    """Return the largest magnitude that the operation gives in float32, if it is finite and over the half type's range."""
    if operation.in_place:
        return None  # the operand is overwritten
    half = operation.dtype
    args, kwargs = pytree.tree_map_only(
        Tensor, lambda tensor: tensor.float() if tensor.dtype == half else tensor, (operation.args, operation.kwargs)
    )
    if kwargs.get("dtype") == half:
        kwargs = {**kwargs, "dtype": torch.float32}
    try:
        made = results_of(operation.func(*args, **kwargs))
    except (RuntimeError, TypeError):
        return None
    largest = made[0].abs().max().item() if made and made[0].is_floating_point() else float("nan")
    return largest if operation.half.largest < largest < float("inf") else None


@dataclass
class PositionCheck:
    """Finds whole numbers that the half type cannot tell apart, and angles that it cannot resolve."""

    log: FindingLog
    _counts: Any = field(default_factory=WeakTensorKeyDictionary)

    def after(self, operation: Operation, result: Any) -> None:
        """Follow positions through an operation, and check its half-precision results."""
        carries = any(tensor in self._counts for tensor in operation.tensors)
        for made in results_of(result):
            if made.dtype != operation.dtype:
                continue
            if operation.name in ("sin", "cos") and carries:
                self._check_angles(operation, made)
            elif _counts(operation, made) or (operation.name in CARRIERS and carries):
                self._counts[made] = True
                self._check_numbers(operation, made)

    def _check_numbers(self, operation: Operation, made: Tensor) -> None:
        exact = _exact(operation)
        if exact is None or exact.numel() != made.numel():
            return
        off = made.double().reshape(-1) != exact.reshape(-1)
        if off.any():
            first = exact.reshape(-1)[off][0].item()
            became = made.double().reshape(-1)[off][0].item()
            text = (
                f"{int(off.sum())} of {made.numel()} whole numbers change when they become {operation.half.name}, which is "
                f"exact up to {operation.half.whole_numbers}: {first:.0f} becomes {became:.0f}"
            )
            self.log.add("position", "warning", operation.place, operation.module, text, ".float()")

    def _check_angles(self, operation: Operation, made: Tensor) -> None:
        largest = operation.tensors[0].abs().max().item() if made.numel() else 0.0
        if largest < 1:
            return
        step = 2.0**-operation.half.significant_bits
        text = (
            f"angles up to {largest:.4g} are {operation.half.name} and off by up to {largest * step:.2g} rad; the error grows "
            f"with the position, to {1000 * step:.1g} rad at 1000"
        )
        self.log.add("position", "warning", operation.place, operation.module, text, ".float()")


def _counts(operation: Operation, made: Tensor) -> bool:
    if operation.name == "arange":
        return True
    return made.dim() > 0 and operation.name in CARRIERS and any(_counts_up(tensor) for tensor in operation.tensors)


def _counts_up(tensor: Tensor) -> bool:
    # Zeros and ones are a mask.
    whole = not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool
    return whole and tensor.dim() > 0 and tensor.numel() > 0 and bool(tensor.max() > 1)


def _exact(operation: Operation) -> Tensor | None:
    if operation.name == "_to_copy" and not operation.tensors[0].is_floating_point():
        return operation.tensors[0].double()
    if operation.name == "arange":
        numbers = [value for value in operation.args if isinstance(value, int | float)]
        whole = all(float(number).is_integer() for number in numbers)
        return torch.arange(*numbers, dtype=torch.float64).round() if whole else None
    return None


@dataclass
class SquareCheck:
    """Follows squares to the sum or mean of them, and from there to a difference: E[x^2] - E[x]^2 cancels."""

    log: FindingLog
    _squares: Any = field(default_factory=WeakTensorKeyDictionary)
    _means: Any = field(default_factory=WeakTensorKeyDictionary)

    def after(self, operation: Operation, result: Any) -> None:
        """Follow squares through an operation, and check its half-precision results."""
        for made in results_of(result):
            if made.dtype == operation.dtype:
                self._follow(operation, made)

    def _follow(self, operation: Operation, made: Tensor) -> None:
        source = operation.tensors[0] if operation.tensors else None
        if _is_square(operation):
            self._squares[made] = source
        elif operation.name in SHAPES and source is not None:
            for tags in (self._squares, self._means):
                if source in tags:
                    tags[made] = tags[source]
        elif operation.name in ("sum", "mean") and source in self._squares:
            self._means[made] = self._log_sum(operation, self._squares[source])
        elif operation.name in ("sub", "sub_") and source in self._means:
            self._log_variance(operation, made, self._means[source])

    def _log_sum(self, operation: Operation, squared: Tensor) -> Key:
        largest = squared.abs().max().item() if squared.numel() else 0.0
        half = operation.half
        limit = "" if half.has_float32_range else f", and from {SQUARES_LIMIT} on its square is inf"
        text = (
            f"squares are added up in {half.name}: |x| reaches {largest:.4g} here{limit}; "
            f"each partial result keeps {half.significant_bits} bits"
        )
        return self.log.add("squares", "warning", operation.place, operation.module, text, "x.float()")

    def _log_variance(self, operation: Operation, made: Tensor, mean: Key) -> None:
        self.log.remove(mean)
        minuend = operation.tensors[0].abs().max().item() if made.numel() else 0.0
        off = minuend * 2.0**-operation.half.significant_bits
        text = (
            f"E[x^2] - E[x]^2 in {operation.half.name} cancels: E[x^2] reaches {minuend:.4g} and is off by up to {off:.2g}, in "
            f"which a small variance drowns (least here {made.min().item():.2g})"
        )
        self.log.add("variance", "warning", operation.place, operation.module, text, "torch.var")


def _is_square(operation: Operation) -> bool:
    if operation.name == "pow":
        base, exponent = operation.args[:2]
        return isinstance(base, Tensor) and isinstance(exponent, int | float) and exponent == 2
    if operation.name == "mul":
        return operation.args[0] is operation.args[1]
    return operation.name == "square"
