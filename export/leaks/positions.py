"""Whole numbers that float16 cannot tell apart, and angles that it cannot resolve."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from export.leaks.log import Log
from export.leaks.operation import HALF, Operation, results_of

EXACT_UP_TO = 2048

# Angles are positions times frequencies, through these. What is added to something else is no angle any more.
CARRIERS = frozenset({
    "_to_copy", "_unsafe_view", "alias", "bmm", "cat", "clone", "detach", "div", "expand", "mm", "mul", "permute",
    "repeat", "reshape", "select", "slice", "stack", "t", "transpose", "unsqueeze", "view",
})  # fmt: skip


@dataclass
class Positions:
    """Follows numbers that count something through a float16 run.

    Attributes:
        log: Where findings go.
    """

    log: Log
    _counts: Any = field(default_factory=WeakTensorKeyDictionary)

    def after(self, operation: Operation, result: Any) -> None:
        """Take an operation's results in."""
        for made in results_of(result):
            if made.dtype != HALF:
                continue
            if operation.name in ("sin", "cos") and self._carries(operation):
                self._report_angles(operation, made)
            elif _counts(operation, made) or (operation.name in CARRIERS and self._carries(operation)):
                self._counts[made] = True
                self._check(operation, made)

    def _carries(self, operation: Operation) -> bool:
        return any(tensor in self._counts for tensor in operation.tensors)

    def _check(self, operation: Operation, made: Tensor) -> None:
        exact = _exact(operation)
        if exact is None or exact.numel() != made.numel():
            return
        off = made.double().reshape(-1) != exact.reshape(-1)
        if off.any():
            first = exact.reshape(-1)[off][0].item()
            became = made.double().reshape(-1)[off][0].item()
            text = (
                f"{int(off.sum())} of {made.numel()} whole numbers change when they become float16, which is exact up to "
                f"{EXACT_UP_TO}: {first:.0f} becomes {became:.0f}"
            )
            self.log.add("position", "warning", operation.place, operation.module, text, ".float()")

    def _report_angles(self, operation: Operation, made: Tensor) -> None:
        angles = operation.tensors[0]
        largest = angles.abs().max().item() if made.numel() else 0.0
        if largest < 1:
            return
        off = largest * 2**-11
        text = (
            f"angles up to {largest:.4g} are float16 and off by up to {off:.2g} rad; the error grows with the position, "
            "to 0.5 rad at 1000"
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
        return torch.arange(*numbers, dtype=torch.float64).round() if _whole(numbers) else None
    return None


def _whole(numbers: list[int | float]) -> bool:
    return all(float(number).is_integer() for number in numbers)
