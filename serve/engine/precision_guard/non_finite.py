"""Whether arrays hold NaN or infinities, at the least cost: this runs on every output of every batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from protos.datatypes import Datatype
from serve.engine.tensors import Array

Check = Callable[[Array], bool]

WORD = np.dtype(np.uint16)
WITHOUT_SIGN = np.array(0x7FFF, np.uint16)
# A 16-bit number is not finite where its exponent is all ones, and then its bits without the sign are no less than these.
EXPONENTS = {"float16": 0x7C00, "bfloat16": 0x7F80}
# Up to here a look at every other byte is done before numpy has started.
BYTES_ELEMENTS = 512
# The same where each request's share is looked at.
FLAGS_ELEMENTS = 8192
# Up to here BLAS has the product before a reduction of numpy's has started; beyond, it would wake threads of its own.
VDOT_ELEMENTS = 4096
# A large array that holds any usually holds some of them among its first.
PEEK_ELEMENTS = 2048
_largest, _and = np.maximum.reduce, np.bitwise_and


def check_of(datatype: Datatype) -> Check | None:
    """The check for outputs of a datatype: True where a value is NaN or infinite. None where there can be no such values."""
    return {"FP16": _fp16, "BF16": _bf16, "FP32": _wide, "FP64": _wide}.get(datatype.wire)


def has_non_finite(array: Array, *, likely: bool = False) -> bool:
    """Whether a value is NaN or infinite. Where that is likely, the first ones are looked at by themselves first."""
    if likely and array.size > PEEK_ELEMENTS:
        array = array.reshape(-1)
        return has_non_finite(array[:PEEK_ELEMENTS]) or has_non_finite(array[PEEK_ELEMENTS:])
    try:
        check = _known[array.dtype]
    except KeyError:
        check = _known[array.dtype] = _check_of_dtype(array.dtype)
    return check is not None and check(array)


def non_finite_mask(array: Array) -> Array:
    """Where the values are NaN or infinite; all False for a dtype that has no such values. The array's shape, bool."""
    exponent = EXPONENTS.get(array.dtype.name)
    if exponent is not None:
        bits: Array = _and(array.view(WORD), WITHOUT_SIGN) >= exponent
        return bits
    return ~np.isfinite(array) if array.dtype.kind == "f" else np.zeros(array.shape, np.bool_)


def bad_stretches(array: Array, ends: Sequence[int]) -> list[bool]:
    """For each stretch of rows whether it holds such a value.

    Args:
        array: rows first.
        ends: where each stretch ends, in rising order; it begins where the one before ends, the first one at 0.
    """
    if array.dtype == np.float16 and 0 < array.size <= FLAGS_ELEMENTS:
        flags = array.tobytes()[1::2].translate(FP16_SUSPECTS)
        width = array.size // array.shape[0]
        stops = [end * width for end in ends]
        return [1 in flags[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]
    return [has_non_finite(array[start:end], likely=True) for start, end in zip((0, *ends), ends, strict=False)]


def count_non_finite(array: Array) -> int:
    """How many values are NaN or infinite."""
    return int(np.count_nonzero(non_finite_mask(array)))


def _suspects(exponent: int) -> bytes:
    """A table that makes 1 of the upper bytes, with either sign, that a number that is not finite can have, and 0 of others."""
    return bytes(byte & 0x7F >= exponent >> 8 for byte in range(256))


FP16_SUSPECTS = _suspects(EXPONENTS["float16"])  # and for float16 there is no need to look at the lower byte


def _sixteen_bits(name: str) -> Check:
    exponent = EXPONENTS[name]
    suspects = _suspects(exponent)
    suspects_are_bad = exponent & 0xFF == 0

    def check(array: Array) -> bool:
        if array.size <= BYTES_ELEMENTS:
            suspect = 1 in array.tobytes()[1::2].translate(suspects)
            if suspects_are_bad or not suspect:
                return suspect
        # numpy's own half-precision arithmetic goes through float32 one by one; on the bits it runs in vectors.
        return array.size > 0 and bool(_largest(_and(array.view(WORD), WITHOUT_SIGN), None) >= exponent)

    return check


def _wide(array: Array) -> bool:
    if array.size <= VDOT_ELEMENTS and np.vdot(array, array) < np.inf:  # NaN is not less either
        return False
    return not np.isfinite(array).all()  # large numbers' squares overflow too


def _check_of_dtype(dtype: np.dtype[Any]) -> Check | None:
    if dtype.kind == "f" and dtype.itemsize > 2:
        return _wide
    return {"float16": _fp16, "bfloat16": _bf16}.get(dtype.name)


_fp16, _bf16 = _sixteen_bits("float16"), _sixteen_bits("bfloat16")
_known: dict[np.dtype[Any], Check | None] = {}
