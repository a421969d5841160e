"""Numbers in the source that the half type cannot hold, in lines that ran and in lines that did not."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from halfserve.export.dtype_check.findings import FindingLog
from halfserve.export.dtype_check.inherit_dtype import HELPERS
from halfserve.export.dtype_check.source_lines import SourceLine, SourceLocator, parsed
from halfserve.export.dtype_check.watched_run import Operation, results_of
from halfserve.export.half_types import HalfType

NOTABLE_ERROR = 0.01  # 1e-5 is subnormal too and off by 0.1 %, which does not matter for an epsilon

FILLS = frozenset({"fill_", "fill", "full", "full_like", "new_full", "masked_fill", "masked_fill_", "where", "constant_pad_nd"})
SUMS = frozenset({"add", "add_", "sub", "sub_", "rsub"})
BOUNDS = frozenset(
    {"clamp", "clamp_", "clamp_min", "clamp_min_", "clamp_max", "clamp_max_", "maximum", "minimum", "nan_to_num"}
)
SCALES = frozenset({"mul", "mul_", "div", "div_", "true_divide", "reciprocal"})
WATCHED = FILLS | SUMS | BOUNDS | SCALES | {"scalar_tensor"}

# Without a dtype these are float32, whatever their arguments are.
FLOAT_FACTORIES = frozenset({"zeros", "ones", "empty", "eye", "rand", "randn", "linspace"})


@dataclass
class ConstantCheck:
    """Checks the numbers that operations on half-precision tensors take."""

    log: FindingLog
    _scalars: Any = field(default_factory=WeakTensorKeyDictionary)

    def before(self, operation: Operation) -> bool:
        """Log the constants that do not fit.

        Returns:
            Whether one of them is beyond the half type's range, so that the kernel may refuse it.
        """
        if operation.name not in WATCHED or not _is_half(operation):
            return False
        beyond = [self._check(operation, number) for number in self._numbers(operation)]  # all of them are logged
        return any(beyond)

    def beyond_wide(self, operation: Operation) -> list[float]:
        """Return the finite numbers beyond the half type's range that an operation writes into a tensor of another dtype."""
        if operation.name not in FILLS | SCALES or _is_half(operation):
            return []
        return [number for number in self._numbers(operation) if operation.half.overflow_from <= abs(number) < math.inf]

    def after(self, operation: Operation, result: Any) -> None:
        """Remember tensors that hold one constant (`torch.tensor(1e-8)`), and check masks that turn infinite when rounded."""
        for made in results_of(result):
            if made.dtype in operation.wide and not made.dim() and not made.is_complex() and not _computed(operation):
                self._scalars[made] = float(made)
            if operation.name == "_to_copy" and made.dtype == operation.dtype:
                self._check_rounding(operation, operation.tensors[0], made)

    def _numbers(self, operation: Operation) -> Iterator[float]:
        named = (operation.kwargs.get(name) for name in ("min", "max", "value", "nan", "posinf", "neginf"))
        for value in (*operation.args, *named):
            if isinstance(value, Tensor) and value in self._scalars:
                yield self._scalars[value]
            elif isinstance(value, int | float) and not isinstance(value, bool):
                yield float(value)

    def _check(self, operation: Operation, number: float) -> bool:
        size, half = abs(number), operation.half
        if math.isinf(number):
            if number < 0 and operation.name in FILLS and operation.place is not None:
                text = "-inf hides, but a row that is hidden whole is NaN after softmax, and so is 0 * -inf"
                self._log(operation, "infinite_mask", "note", text, "mask_value(x)")
        elif size >= half.overflow_from:
            self._log(operation, "constant", "error", _beyond(operation, number), _fix_beyond(operation, number))
            return True
        elif 0 < size < half.smallest_normal:
            self._check_small(operation, number)
        return False

    def _check_small(self, operation: Operation, number: float) -> None:
        half, fix = operation.half, "finfo(x).tiny" if operation.name in SUMS | BOUNDS | FILLS else "rescale"
        if abs(number) <= half.largest_flushed:
            least = f"{half.smallest_subnormal:.1g}"
            text = f"{number:g} is 0 in {half.name} (nothing between 0 and {least}): {_consequence(operation)}"
            self._log(operation, "epsilon", "error", text, fix)
            return
        held = float(torch.tensor(number, dtype=torch.float64).to(operation.dtype))
        off = abs(held - number) / abs(number)
        severity = "warning" if off > NOTABLE_ERROR else "note"
        text = f"{number:g} is subnormal in {half.name}: {held:g}, off by {off:.2%}, and 0 where subnormals are flushed"
        self._log(operation, "epsilon", severity, text, fix)

    def _check_rounding(self, operation: Operation, wide: Tensor, made: Tensor) -> None:
        if wide.dtype == operation.dtype or not wide.is_floating_point():
            return
        lost = wide.isfinite() & made.isinf()
        if lost.any():
            worst = wide[lost].abs().max().item()
            sign = "-" if bool((wide[lost] < 0).all()) else ""
            text = (
                f"{int(lost.sum())} of {wide.numel()} values, up to {sign}{worst:g}, become {sign}inf when rounded to "
                f"{operation.half.name}"
            )
            self._log(operation, "constant", "error", text, "mask_value(x)" if sign else "rescale")

    def _log(self, operation: Operation, kind: str, severity: Any, text: str, fix: str) -> None:
        self.log.add(kind, severity, operation.place, operation.module, text, fix)


def _is_half(operation: Operation) -> bool:
    if operation.kwargs.get("dtype") == operation.dtype:
        return True
    values = [t for t in operation.tensors if t.dtype in operation.wide and t.dim()]
    return not values and any(tensor.dtype == operation.dtype for tensor in operation.tensors)


def _computed(operation: Operation) -> bool:
    return bool(operation.tensors) and operation.name not in ("lift_fresh", "detach", "clone")


def _beyond(operation: Operation, number: float) -> str:
    infinite, half = "-inf" if number < 0 else "inf", operation.half
    largest = f"(largest {half.largest:g})"
    if operation.name in FILLS:
        return f"{number:g} does not fit {half.name} {largest}: torch refuses to write it, an exported graph writes {infinite}"
    if operation.name in SCALES:
        graph = f"{number:g} is {infinite} in a {half.name} graph {largest}"
        return f"{graph}, and 0 * {infinite} is NaN where eager gives 0"
    return f"{number:g} is {infinite} in {half.name} {largest}"


def _fix_beyond(operation: Operation, number: float) -> str:
    if operation.name in FILLS | SUMS or (number < 0 and operation.name in SCALES):
        return "mask_value(x)"
    return "finfo(x).max" if operation.name in BOUNDS else "rescale"


def _consequence(operation: Operation) -> str:
    if operation.name in SCALES:
        return "x * it is 0, x / it is inf or NaN"
    return "a division, log or rsqrt behind it gives inf or NaN where the tensor is 0"


def check_unexecuted(locator: SourceLocator, log: FindingLog, half: HalfType) -> None:
    """Log factories without dtype and constants that do not fit, in the lines that did not run of functions that ran.

    Only the user's own files are read, not installed ones.
    """
    for code in locator.seen:
        function = _function(code) if locator.is_own(code.co_filename) else None
        if function is None:
            continue
        ran = locator.lines_of(code.co_filename)
        for node in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            symptom = _symptom(node, half)
            if symptom is not None and not ran.intersection(range(node.lineno, (node.end_lineno or node.lineno) + 1)):
                text, fix = symptom
                place = SourceLine(code.co_filename, node.lineno)
                log.add("not_reached", "note", place, "", f"{text}; the inputs did not reach this line", fix)


def _function(code: CodeType) -> ast.AST | None:
    functions = [node for node in ast.walk(parsed(code.co_filename)) if isinstance(node, ast.FunctionDef)]
    starts = {line: node for node in functions for line in (node.lineno, *(d.lineno for d in node.decorator_list))}
    return starts.get(code.co_firstlineno)


def _symptom(node: ast.Call, half: HalfType) -> tuple[str, str] | None:
    if not isinstance(node.func, ast.Attribute):
        return None
    name = node.func.attr
    if isinstance(node.func.value, ast.Name) and node.func.value.id == "torch" and name in FLOAT_FACTORIES:
        if not any(keyword.arg in ("dtype", "out", None) for keyword in node.keywords):
            return f"torch.{name} without dtype makes float32", HELPERS.get(name, "dtype=x.dtype")
    elif name in ("masked_fill", "masked_fill_", "clamp", "clamp_min", "add"):
        number = next((value for value in map(_number, node.args) if value is not None and _unfit(value, half)), None)
        if number is not None:
            return f"{number:g} does not fit {half.name}", "mask_value(x)" if abs(number) > 1 else "finfo(x).tiny"
    return None


def _number(node: ast.expr) -> float | None:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _unfit(number: float, half: HalfType) -> bool:
    return half.overflow_from <= abs(number) < math.inf or 0 < abs(number) <= half.largest_flushed
