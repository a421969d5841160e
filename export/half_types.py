"""The half-precision types that models are converted to: what each holds, and how it rounds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np

from halfserve.export.export_errors import UsageError

Array: TypeAlias = np.ndarray[Any, Any]
HalfName: TypeAlias = Literal["float16", "bfloat16"]
DtypeChoice: TypeAlias = Literal["float16", "bfloat16", "auto"]
TargetDevice: TypeAlias = Literal["cuda", "cpu", "any"]  # where ONNX Runtime shall run a converted model
Accumulators: TypeAlias = Literal["float32", "float16"]  # types in which a runtime adds up the terms of a product


@dataclass(frozen=True, kw_only=True)
class HalfType:
    """A floating-point type of 16 bits.

    Attributes:
        name: The type's name in numpy, torch and ONNX.
        short: The short name for titles.
        elem_type: The number in `onnx.TensorProto.DataType`.
        significant_bits: Bits of the significand, the leading one included; rounding changes a number by at most
            2**-significant_bits of it.
        largest: The largest finite number.
        smallest_normal: The smallest number with all significant bits.
        smallest_subnormal: The smallest number above 0.
    """

    name: HalfName
    short: Literal["fp16", "bf16"]
    elem_type: int
    significant_bits: int
    largest: float
    smallest_normal: float
    smallest_subnormal: float

    @property
    def whole_numbers(self) -> int:
        """All whole numbers up to this one are exact."""
        return 1 << self.significant_bits

    @property
    def overflow_from(self) -> float:
        """From this magnitude on, halfway from the largest number to the next power of two, rounding gives infinity."""
        return self.largest / (2 - 2.0 ** (1 - self.significant_bits)) * (2 - 2.0**-self.significant_bits)

    @property
    def largest_flushed(self) -> float:
        """The largest number that rounds to 0: the tie between 0 and the smallest subnormal goes to the even one, 0."""
        return self.smallest_subnormal / 2

    @property
    def has_float32_range(self) -> bool:
        """Whether rounding loses digits alone: no float32 number that a model holds becomes infinite or 0."""
        return self.smallest_normal == float(np.finfo(np.float32).smallest_normal)

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The numpy dtype; bfloat16 is one of `ml_dtypes`."""
        if self.name == "float16":
            return np.dtype(np.float16)
        import ml_dtypes  # noqa: PLC0415  (float16 alone does without)

        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16

    def narrowed(self, values: Array, *, saturate: bool = False) -> Array:
        """Round to the nearest numbers of this type, ties to even.

        Args:
            values: Floats.
            saturate: Whether finite numbers beyond the range become its largest number, instead of infinity.
        """
        if saturate:
            values = np.where(np.isfinite(values), np.clip(values, -self.largest, self.largest), values)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            return np.asarray(values).astype(self.dtype)

    def rounded(self, values: Array) -> Array:
        """Float32 or float64 numbers rounded to this type, in their own dtype; any other array unchanged."""
        return self.narrowed(values).astype(values.dtype) if values.dtype in (np.float32, np.float64) else values


FP16 = HalfType(
    name="float16",
    short="fp16",
    elem_type=10,
    significant_bits=11,
    largest=65504.0,
    smallest_normal=2.0**-14,
    smallest_subnormal=2.0**-24,
)
BF16 = HalfType(
    name="bfloat16",
    short="bf16",
    elem_type=16,
    significant_bits=8,
    largest=(2 - 2.0**-7) * 2.0**127,
    smallest_normal=2.0**-126,
    smallest_subnormal=2.0**-133,
)
HALF_TYPES: dict[HalfName, HalfType] = {half.name: half for half in (FP16, BF16)}
HALF_BY_ELEM_TYPE = {half.elem_type: half for half in (FP16, BF16)}


def half_named(name: str) -> HalfType:
    """Return the type of a name.

    Raises:
        UsageError: It is neither "float16" nor "bfloat16".
    """
    found = next((half for half in HALF_TYPES.values() if half.name == name), None)
    if found is None:
        raise UsageError(f"dtype is {name!r}; expected {' or '.join(repr(known) for known in HALF_TYPES)}")
    return found


FP16_MAX = FP16.largest
FP16_OVERFLOW = FP16.overflow_from
FP16_SMALLEST_NORMAL = FP16.smallest_normal


@dataclass(frozen=True, kw_only=True)
class WeightLedger:
    """Counts of what rounding a tensor does to its elements; the numbers are those of float16.

    Attributes:
        overflow: Finite elements beyond the type's range: over 65504 in magnitude.
        flushed: Non-zero elements that become zero (magnitude at most 2**-25).
        subnormal: Elements that stay non-zero below 2**-14, where the type has fewer significant bits.
    """

    overflow: int = 0
    flushed: int = 0
    subnormal: int = 0

    def __add__(self, other: WeightLedger) -> WeightLedger:
        return WeightLedger(
            overflow=self.overflow + other.overflow,
            flushed=self.flushed + other.flushed,
            subnormal=self.subnormal + other.subnormal,
        )


def ledger_of(values: np.ndarray[Any, Any], half: HalfType = FP16) -> WeightLedger:
    """Count what rounding a floating array does to its elements."""
    magnitude = np.abs(values)
    return WeightLedger(
        overflow=int(np.count_nonzero(np.isfinite(magnitude) & (magnitude > half.largest))),
        flushed=int(np.count_nonzero((magnitude > 0) & (magnitude <= half.largest_flushed))),
        subnormal=int(np.count_nonzero((magnitude > half.largest_flushed) & (magnitude < half.smallest_normal))),
    )
