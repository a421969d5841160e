"""The numbers that steer a loss scale, each with its limits."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeVar, get_args

from torch import Tensor

OnMinScale = Literal["warn", "raise", "stop"]
Hook = TypeVar("Hook", bound=Any)

# Below this the reciprocal of a scale is no longer a finite float32; at the other end the scale itself is not.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**127
# The smallest normal float16: a loss that overflows even when multiplied with this is no matter of scaling.
DEFAULT_MIN_SCALE = 2.0**-14


def checked_growth_factor(value: float) -> float:
    """Return `value` if the scale can grow by it.

    Raises:
        ValueError: If it is not a finite number above 1.
    """
    if not _is_number(value) or not 1.0 < value < math.inf:
        raise ValueError(f"The growth factor must be > 1.0 and finite, got {value!r}")
    return value


def checked_backoff_factor(value: float) -> float:
    """Return `value` if the scale can shrink by it.

    Raises:
        ValueError: If it is not between 0 and 1, both excluded.
    """
    if not _is_number(value) or not 0.0 < value < 1.0:
        raise ValueError(f"The backoff factor must be < 1.0 and > 0.0, got {value!r}")
    return value


def checked_growth_interval(value: int) -> int:
    """Return `value` if it is a number of steps.

    Raises:
        ValueError: If it is not an integer of at least 1.
    """
    return checked_count(value, 1, "The growth interval")


def checked_range(min_scale: float, max_scale: float) -> tuple[float, float]:
    """Return both if they are a range that a float32 scale and its reciprocal can move in.

    Raises:
        ValueError: If they are not.
    """
    ok = _is_number(min_scale) and _is_number(max_scale) and SMALLEST_SCALE <= min_scale <= max_scale <= LARGEST_SCALE
    if not ok:
        raise ValueError(f"expected 2**-126 <= min_scale <= max_scale <= 2**127, got {min_scale!r} and {max_scale!r}")
    return min_scale, max_scale


def checked_scale(value: float, low: float, high: float, name: str) -> float:
    """Return `value` as a float if it is a scale between two limits.

    Raises:
        ValueError: If it is not; names `name`.
    """
    if not _is_number(value) or not low <= value <= high:
        raise ValueError(f"{name} must be between min_scale {low:g} and max_scale {high:g}, got {value!r}")
    return float(value)


def number_of(value: float | Tensor, name: str) -> Any:
    """The number in a tensor of one element; anything else as it is, for `checked_scale` to judge. Waits for the device.

    Raises:
        ValueError: If the tensor requires a gradient; names `name`.
    """
    if not isinstance(value, Tensor) or value.numel() != 1:
        return value
    if value.requires_grad:
        raise ValueError(f"{name} must be a number or a tensor that requires no gradient, got {value!r}; pass {name}.detach()")
    return value.item()


def checked_count(value: int, least: int, name: str) -> int:
    """Return `value` if it is a count.

    Raises:
        ValueError: If it is not an integer of at least `least`; names `name`.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
    return value


def checked_on_min_scale(value: OnMinScale) -> OnMinScale:
    """Return `value` if it is something to do when the smallest scale overflows.

    Raises:
        ValueError: If it is not.
    """
    if value not in get_args(OnMinScale):
        raise ValueError(f"on_min_scale must be 'warn', 'raise' or 'stop', got {value!r}")
    return value


def checked_hook(value: Hook, name: str) -> Hook:
    """Return `value` if it is None or can be called.

    Raises:
        ValueError: If it is neither; names `name`.
    """
    if value is not None and not callable(value):
        raise ValueError(f"{name} must be a function of a tensor, or None, got {value!r}")
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
