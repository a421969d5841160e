"""Sums of squares in float16: they end at 65504, and E[x^2] - E[x]^2 cancels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from export.leaks.log import Key, Log
from export.leaks.operation import HALF, Operation, results_of

SQUARES_LIMIT = 256  # 256**2 is 65536
SHAPES = frozenset(
    {"_unsafe_view", "alias", "clone", "detach", "expand", "permute", "squeeze", "t", "transpose", "unsqueeze", "view"}
)


@dataclass
class Squares:
    """Follows squares to the sum or mean that adds them up, and that to a difference.

    Attributes:
        log: Where findings go.
    """

    log: Log
    _squares: Any = field(default_factory=WeakTensorKeyDictionary)
    _means: Any = field(default_factory=WeakTensorKeyDictionary)

    def after(self, operation: Operation, result: Any) -> None:
        """Take an operation's results in."""
        for made in results_of(result):
            if made.dtype == HALF:
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
            self._means[made] = self._report_sum(operation, self._squares[source])
        elif operation.name in ("sub", "sub_") and source in self._means:
            self._report_variance(operation, made, self._means[source])

    def _report_sum(self, operation: Operation, squared: Tensor) -> Key:
        largest = squared.abs().max().item() if squared.numel() else 0.0
        text = (
            f"squares are added up in float16: |x| reaches {largest:.4g} here, and from {SQUARES_LIMIT} on its square is inf; "
            "each partial result keeps 11 bits"
        )
        return self.log.add("squares", "warning", operation.place, operation.module, text, "x.float()")

    def _report_variance(self, operation: Operation, made: Tensor, mean: Key) -> None:
        self.log.forget(mean)
        minuend = operation.tensors[0].abs().max().item() if made.numel() else 0.0
        text = (
            f"E[x^2] - E[x]^2 in float16 cancels: E[x^2] reaches {minuend:.4g} and is off by up to {minuend * 2**-11:.2g}, in "
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
