"""Detects NaN and infinities in arrays at the least cost, because it runs on every output of every batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from halfserve.protos.datatypes import Datatype
from halfserve.serve.engine.tensors import Array

Check = Callable[[Array], bool]
WORD, SIGNED_WORD = np.dtype(np.uint16), np.dtype(np.int16)
SIGN = 0x8000
WITHOUT_SIGN = np.array(0x7FFF, np.uint16)
# A 16-bit number is not finite if its exponent is all ones: its bits without the sign are then at least these.
EXPONENTS = {"float16": 0x7C00, "bfloat16": 0x7F80}
# Up to this size, checking every other byte is faster than starting numpy.
BYTES_ELEMENTS = 512
# The corresponding size if each request's rows are checked.
FLAGS_ELEMENTS = 8192
# Up to this size BLAS's dot product is faster than a numpy reduction; beyond, BLAS would wake its threads.
VDOT_ELEMENTS = 4096
# From this size on, a copy without the signs costs more than a second pass: its memory is mapped and unmapped each time.
TWO_PASSES_ELEMENTS = 65_536
# A large array with non-finite values usually has some among the first.
PEEK_ELEMENTS = 2048
_largest, _and = np.maximum.reduce, np.bitwise_and


def check_of(datatype: Datatype) -> Check | None:
    """Return the check for NaN and infinities in outputs of a datatype; None for datatypes without such values."""
    return {"FP16": _fp16, "BF16": _bf16, "FP32": _wide, "FP64": _wide}.get(datatype.wire)


def has_non_finite(array: Array, *, likely: bool = False) -> bool:
    """Return whether a value is NaN or infinite; `likely` checks the first values separately before the rest."""
    if likely and array.size > PEEK_ELEMENTS:
        array = array.reshape(-1)
        return has_non_finite(array[:PEEK_ELEMENTS]) or has_non_finite(array[PEEK_ELEMENTS:])
    try:
        check = _known[array.dtype]
    except KeyError:
        check = _known[array.dtype] = _check_of_dtype(array.dtype)
    return check is not None and check(array)


def non_finite_mask(array: Array) -> Array:
    """Return a bool mask of the array's shape for NaN and infinite values; all False for dtypes without such values."""
    exponent = EXPONENTS.get(array.dtype.name)
    if exponent is not None:
        bits: Array = _and(array.view(WORD), WITHOUT_SIGN) >= exponent
        return bits
    return ~np.isfinite(array) if array.dtype.kind == "f" else np.zeros(array.shape, np.bool_)


def bad_stretches(array: Array, ends: Sequence[int]) -> list[bool]:
    """Return whether each stretch of rows holds NaN or infinities. `ends`, rising and exclusive, divide the rows into
    stretches.
    """
    if array.dtype == np.float16 and 0 < array.size <= FLAGS_ELEMENTS:
        flags = array.tobytes()[1::2].translate(FP16_SUSPECTS)
        width = array.size // array.shape[0]
        stops = [end * width for end in ends]
        return [1 in flags[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]
    return [has_non_finite(array[start:end], likely=True) for start, end in zip((0, *ends), ends, strict=False)]


def count_non_finite(array: Array) -> int:
    return int(np.count_nonzero(non_finite_mask(array)))


def _suspects(exponent: int) -> bytes:
    """Make a table from upper bytes, with either sign, to 1 if a non-finite number can have that byte, else 0."""
    return bytes(byte & 0x7F >= exponent >> 8 for byte in range(256))


FP16_SUSPECTS = _suspects(EXPONENTS["float16"])  # for float16 the upper byte suffices


def _sixteen_bits(name: str) -> Check:
    exponent = EXPONENTS[name]
    suspects = _suspects(exponent)
    suspects_are_bad = exponent & 0xFF == 0

    def check(array: Array) -> bool:
        if array.size <= BYTES_ELEMENTS:
            suspect = 1 in array.tobytes()[1::2].translate(suspects)
            if suspects_are_bad or not suspect:
                return suspect
        # numpy's half-precision arithmetic converts element by element; on the bits it is vectorized.
        if array.size >= TWO_PASSES_ELEMENTS:  # positive numbers are the largest as signed words, negative ones as unsigned
            positive, negative = _largest(array.view(SIGNED_WORD), None), _largest(array.view(WORD), None)
            return bool(positive >= exponent or negative >= SIGN | exponent)
        return array.size > 0 and bool(_largest(_and(array.view(WORD), WITHOUT_SIGN), None) >= exponent)

    return check


def _wide(array: Array) -> bool:
    if array.size <= VDOT_ELEMENTS and np.vdot(array, array) < np.inf:  # False for NaN too
        return False
    return not np.isfinite(array).all()  # squares of large finite numbers overflow too


def _check_of_dtype(dtype: np.dtype[Any]) -> Check | None:
    if dtype.kind == "f" and dtype.itemsize > 2:
        return _wide
    return {"float16": _fp16, "bfloat16": _bf16}.get(dtype.name)


_fp16, _bf16 = _sixteen_bits("float16"), _sixteen_bits("bfloat16")
_known: dict[np.dtype[Any], Check | None] = {}
