"""Finite numbers that turn infinite or NaN in a float16 operation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from export.leaks.log import Log
from export.leaks.operation import HALF, Operation, results_of
from export.leaks.places import Place

# What these return besides the first is kept for the backward pass: 1 / deviation, which is infinite for a constant row.
SAVING = ("native_", "_native", "_batch_norm", "_fused", "_scaled_dot_product", "cudnn")

UNDEFINED = ("empty", "new_empty", "_to_copy", "copy_", "_empty")


@dataclass
class Overflow:
    """Watches where the first infinity or NaN appears.

    Attributes:
        log: Where findings go; None for the float32 run, which only shows what is not float16's fault.
        expected: Lines that make infinities or NaN in float32 too.
    """

    log: Log | None = None
    expected: set[Place | None] = field(default_factory=set)
    _was_finite: bool = True

    def before(self, operation: Operation) -> None:
        """Look at what an in-place operation is about to overwrite."""
        if operation.in_place:
            self._was_finite = all(_finite(tensor) for tensor in operation.tensors)

    def after(self, operation: Operation, result: Any, *, excused: bool = False) -> None:
        """Check an operation's results.

        Args:
            operation: The operation.
            result: What it returned.
            excused: Whether a constant in it is known not to fit.
        """
        made_here = results_of(result)[:1] if operation.name.startswith(SAVING) else results_of(result)
        fresh = [made for made in made_here if made.is_floating_point() and not _finite(made)]
        if not fresh:
            return
        finite = self._was_finite if operation.in_place else all(_finite(tensor) for tensor in operation.tensors)
        if not finite or excused or operation.name.startswith(UNDEFINED) or _has_infinity(operation):
            return
        if self.log is None:
            self.expected.add(operation.place)
        elif operation.place not in self.expected and fresh[0].dtype == HALF:
            self._report(self.log, operation, fresh[0])

    def _report(self, log: Log, operation: Operation, made: Tensor) -> None:
        name = operation.call.name if operation.call else operation.name
        count = f"{int((~made.isfinite()).sum())} of {made.numel()} values"
        true = _largest_in_float32(operation)
        if true is None:
            text = f"{name} gives inf or NaN from finite float16 numbers ({count})"
        else:
            text = f"{name} reaches {true:.4g} and float16 ends at 65504: {count} become inf"
        log.add("overflow", "error", operation.place, operation.module, text, ".float()")


def _finite(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex()) or bool(tensor.isfinite().all())


def _has_infinity(operation: Operation) -> bool:
    numbers = (leaf for leaf in pytree.tree_leaves((operation.args, operation.kwargs)) if isinstance(leaf, float))
    return any(number in (float("inf"), float("-inf")) or number != number for number in numbers)  # noqa: PLR0124  (NaN)


def _largest_in_float32(operation: Operation) -> float | None:
    if operation.in_place:
        return None  # the operand is gone
    args, kwargs = pytree.tree_map_only(Tensor, _widened, (operation.args, operation.kwargs))
    try:
        made = results_of(operation.func(*args, **{**kwargs, **_wide_dtype(kwargs)}))
    except (RuntimeError, TypeError):
        return None
    largest = made[0].abs().max().item() if made and made[0].is_floating_point() else float("nan")
    return largest if 65504 < largest < float("inf") else None


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == HALF else tensor


def _wide_dtype(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"dtype": torch.float32} if kwargs.get("dtype") == HALF else {}
