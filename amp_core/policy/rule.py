"""What autocast can do with an operation."""

from __future__ import annotations

from enum import StrEnum


class Rule(StrEnum):
    """What autocast does with an operation's floating inputs (float64 ones and those of other devices stay as they are)."""

    LOW = "low"  # cast to the region's dtype
    FP32 = "fp32"  # cast to float32
    WIDEST = "widest"  # cast to the widest dtype among them
    NATIVE = "native"  # what torch does for the device
    BAN = "ban"  # raise: the operation cannot be made safe
