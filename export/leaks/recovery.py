"""Going on after an operation that refused its arguments, so that one run finds every leak."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from export.leaks.operation import HALF, WIDE, results_of

NO_KERNEL = re.compile(r"not implemented for 'Half'|unsupported dtype Half|Half\b.* not supported", re.IGNORECASE)
FP16_LIMIT = 65504.0


def with_half(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call with every wide floating tensor rounded to float16: what the user's fix will give."""
    rounded = pytree.tree_map_only(Tensor, _halved, (args, kwargs))
    return function(*rounded[0], **rounded[1])


def with_bounded_numbers(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call with every number moved into float16's range."""
    bounded = pytree.tree_map_only((int, float), _bounded, (args, kwargs))
    return function(*bounded[0], **bounded[1])


def with_float32(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call in float32 and round the results: for operations that this machine has no float16 kernel for.

    Writing in place works on a copy, which is then written back.
    """
    raised = pytree.tree_map_only(Tensor, _raised, (args, kwargs))
    result = function(*raised[0], **raised[1])
    if args and isinstance(args[0], Tensor) and result is raised[0][0] and result is not args[0]:
        return args[0].copy_(result)
    return pytree.tree_map_only(Tensor, _halved, result)


def lacks_kernel(error: Exception) -> bool:
    """Whether an error says that there is no float16 kernel here."""
    return NO_KERNEL.search(str(error)) is not None


def mixes(args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether float16 and wider tensors are among the arguments."""
    dtypes = {tensor.dtype for tensor in results_of((args, kwargs))}
    return HALF in dtypes and bool(dtypes & WIDE)


def _halved(tensor: Tensor) -> Tensor:
    return tensor.half() if tensor.dtype in WIDE and tensor.is_floating_point() else tensor


def _raised(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32) if tensor.dtype == HALF else tensor


def _bounded(number: float) -> float:
    if isinstance(number, bool) or abs(number) <= FP16_LIMIT or number in (float("inf"), float("-inf")):
        return number
    return FP16_LIMIT if number > 0 else -FP16_LIMIT
