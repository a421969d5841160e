"""Watchers of the float32 run and of the half-precision run."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from halfserve.export.dtype_check.constants import ConstantCheck
from halfserve.export.dtype_check.findings import FindingLog, Severity
from halfserve.export.dtype_check.numeric_checks import OverflowCheck, PositionCheck, SquareCheck
from halfserve.export.dtype_check.source_lines import SourceLine, SourceLocator, autocast_region
from halfserve.export.dtype_check.watched_run import Operation, results_of
from halfserve.export.dtype_check.wide_tensors import WideTensorTracker
from halfserve.export.half_types import HalfType

_CONSTANT = "leaves torch: an exported graph keeps the example's values as constants"
_NUMBER = "leaves torch: a tensor made of it again is float32, and fixed in an exported graph"
LEAVES_TORCH: dict[str, tuple[Severity, str]] = {
    "numpy": ("warning", _CONSTANT),
    "__array__": ("warning", _CONSTANT),
    "tolist": ("note", _NUMBER),
    "item": ("note", _NUMBER),
    "__float__": ("note", _NUMBER),
}

NO_KERNEL = re.compile(
    r"not implemented for '(Half|BFloat16)'|unsupported dtype (Half|BFloat16)|(Half|BFloat16)\b.* not supported", re.IGNORECASE
)


@dataclass
class ReferenceWatcher:
    """Executes the float32 run, and records which lines make infinities in float32 too."""

    overflow: OverflowCheck = field(default_factory=OverflowCheck)

    def call(self, operation: Operation) -> Any:
        return operation.func(*operation.args, **operation.kwargs)

    def operate(self, operation: Operation) -> Any:
        self.overflow.before(operation)
        result = operation.func(*operation.args, **operation.kwargs)
        self.overflow.after(operation, result)
        return result


class HalfWatcher:
    """Executes the half-precision run; an operation that refuses its arguments is repeated as its fixed form would run.

    Attributes:
        wide_tensors: The wide tensors and their origins.
        recovered: Whether an operation failed and was repeated.
        dtypes: The other floating dtypes that each of the user's lines made, itself or in what it called.
    """

    def __init__(self, log: FindingLog, expected: set[SourceLine | None], locator: SourceLocator) -> None:
        self.log = log
        self.locator = locator
        self.wide_tensors = WideTensorTracker()
        self.recovered = False
        self.dtypes: dict[SourceLine, set[torch.dtype]] = defaultdict(set)
        self.overflow = OverflowCheck(log, expected)
        self.constants = ConstantCheck(log)
        self.value_checks = (PositionCheck(log), SquareCheck(log))

    def call(self, operation: Operation) -> Any:
        """Make the call; if it mixes dtypes and fails before its first operation, repeat it in half precision."""
        self._check_call(operation)
        try:
            result = operation.func(*operation.args, **operation.kwargs)
            self.wide_tensors.after_call(operation, result)
            return result
        except RuntimeError as error:
            if not _mixes_dtypes(operation):
                raise
            try:
                result = _with_half(operation)
            except (RuntimeError, TypeError):
                raise error from None
            self.recovered = True
            self.wide_tensors.refused(operation, error)
            return result

    def operate(self, operation: Operation) -> Any:
        """Run the operation, and apply every check."""
        beyond = self.constants.before(operation)
        self.overflow.before(operation)
        try:
            result = operation.func(*operation.args, **operation.kwargs)
        except (RuntimeError, NotImplementedError) as error:
            result = self._recovered(operation, error, beyond=beyond)
        self.wide_tensors.after(operation, result)
        if numbers := self.constants.beyond_wide(operation):
            self.wide_tensors.wrote(operation, result, numbers)
        self.constants.after(operation, result)
        self.overflow.after(operation, result, excused=beyond)
        for check in self.value_checks:
            check.after(operation, result)
        made = {tensor.dtype for tensor in results_of(result) if tensor.is_floating_point()}
        if made - {operation.dtype}:
            for place in self.locator.callers():
                self.dtypes[place] |= made
        return result

    def _recovered(self, operation: Operation, error: Exception, *, beyond: bool) -> Any:
        self.recovered = True
        try:
            if _mixes_dtypes(operation):
                result = _with_half(operation)
                self.wide_tensors.refused(operation, error)
                return result
            if beyond:
                return _with_bounded_numbers(operation)
            if NO_KERNEL.search(str(error)):
                return _with_float32(operation)
        except (RuntimeError, NotImplementedError, TypeError):
            raise error from None
        raise error

    def _check_call(self, operation: Operation) -> None:
        place = operation.place  # read for every call: it records the lines that ran
        name = getattr(operation.func, "__name__", "")
        source = operation.args[0] if operation.args else None
        if name in LEAVES_TORCH and isinstance(source, torch.Tensor) and source.is_floating_point() and place:
            severity, text = LEAVES_TORCH[name]
            self.log.add("round_trip", severity, place, operation.module, f".{name}() {text}", "torch")
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            around = map(autocast_region, self.locator.callers())
            region = next((found for found in around if found is not None), place)  # a decorator has no `with`
            text = (
                f"autocast inside forward chooses a dtype for each operation, and a {operation.half.name} graph keeps its casts"
            )
            self.log.add("autocast", "warning", region, operation.writer, text, "to_half")


def _mixes_dtypes(operation: Operation) -> bool:
    dtypes = {tensor.dtype for tensor in operation.tensors}
    return operation.dtype in dtypes and bool(dtypes & operation.wide)


def _with_half(operation: Operation) -> Any:
    """Repeat with every wide floating tensor rounded to half precision."""
    args, kwargs = pytree.tree_map_only(Tensor, partial(_rounded, operation), (operation.args, operation.kwargs))
    return operation.func(*args, **kwargs)


def _with_bounded_numbers(operation: Operation) -> Any:
    """Repeat with every finite number moved into the half type's range."""
    args, kwargs = pytree.tree_map_only((int, float), partial(_bounded, operation.half), (operation.args, operation.kwargs))
    return operation.func(*args, **kwargs)


def _with_float32(operation: Operation) -> Any:
    """Repeat in float32 and round the results: for operations without a kernel in half precision on this machine.

    An in-place operation writes into a copy, which is then copied back.
    """
    args, kwargs = pytree.tree_map_only(Tensor, partial(_raised, operation), (operation.args, operation.kwargs))
    result, given = operation.func(*args, **kwargs), operation.args
    if given and isinstance(given[0], Tensor) and result is args[0] and result is not given[0]:
        return given[0].copy_(result)
    return pytree.tree_map_only(Tensor, partial(_rounded, operation), result)


def _rounded(operation: Operation, tensor: Tensor) -> Tensor:
    return tensor.to(operation.dtype) if tensor.dtype in operation.wide and tensor.is_floating_point() else tensor


def _raised(operation: Operation, tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32) if tensor.dtype == operation.dtype else tensor


def _bounded(half: HalfType, number: float) -> float:
    if isinstance(number, bool) or abs(number) <= half.largest or number in (float("inf"), float("-inf")):
        return number
    return half.largest if number > 0 else -half.largest
