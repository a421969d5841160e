"""Decides whether a half-precision model's answer is right; the type is float16 unless another is given.

The rule, the same for every converter. Rounding the inputs to float16 is part of what was asked for, so a converted model may
answer what the float32 model answers to the inputs as they are, or to the inputs rounded to float16; of two such references r
each element has to meet one:

- |answer - r| <= RELATIVE * |r| + ABSOLUTE * scale + 2**-24, with scale the largest finite |r| of that output: 16 and 4
  roundings of float16 (half a unit in the last place is 2**-11), and the smallest number that float16 has;
- where |r| is over 65504, an answer of at least 65504 or an infinity of r's sign is right too: float16 has nothing better;
- where r is NaN or infinite, the answer is the same;
- integers, booleans and strings are equal. (A choice between numbers that are equal after rounding, as ArgMax makes, is thereby
  right when it is made as float32 makes it among the rounded numbers.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from halfserve.export.half_types import FP16, HalfType

Array: TypeAlias = np.ndarray[Any, Any]

RELATIVE, ABSOLUTE = 16, 4  # roundings of the type


def difference(answer: Any, references: Sequence[Any], half: HalfType = FP16) -> str | None:
    """The reason why an answer matches none of the references; None if it matches one.

    Args:
        answer: An array, a list of answers (a sequence), or None (an empty optional).
        references: The right answers, at least one; each element must be close to that of one of them.
        half: The type of the model that answers.
    """
    first = references[0]
    if first is None or answer is None:
        return None if answer is None and any(r is None for r in references) else "an optional is there and should not, or not"
    if isinstance(first, list):
        return _list_difference(answer, references, half)
    if isinstance(first, dict):
        return None if any(answer == r for r in references) else "a map differs"
    return _array_difference(np.asarray(answer), [np.asarray(r) for r in references], half)


def _list_difference(answer: Any, references: Sequence[Any], half: HalfType) -> str | None:
    fitting = [r for r in references if isinstance(answer, list) and len(r) == len(answer)]
    if not fitting:
        return f"a sequence has {len(answer) if isinstance(answer, list) else 'no'} elements instead of {len(references[0])}"
    for i, part in enumerate(answer):
        text = difference(part, [r[i] for r in fitting], half)
        if text is not None:
            return f"element {i}: {text}"
    return None


def _array_difference(answer: Array, references: list[Array], half: HalfType) -> str | None:
    fitting = [r for r in references if r.shape == answer.shape]
    if not fitting:
        return f"shape {list(answer.shape)} instead of {list(references[0].shape)}"
    right = np.zeros(answer.shape, dtype=bool)
    for reference in fitting:
        right |= right_elements(answer, reference, half)
    if right.all():
        return None
    place = tuple(int(i) for i in np.argwhere(~right)[0])
    reference = fitting[0][place]
    wrong = f"{int((~right).sum())} of {answer.size} elements"
    return f"{wrong}, the first at {list(place)}: {answer[place]!s} instead of {reference!s}"


def right_elements(answer: Array, reference: Array, half: HalfType = FP16) -> Array:
    """A boolean array of the same shape: where the answer is right."""
    if not (_is_float(answer) and _is_float(reference)):
        equal: Array = np.asarray(answer == reference)
        return equal
    a, r = answer.astype(np.float64), reference.astype(np.float64)
    finite = np.isfinite(r)
    magnitude = np.abs(np.where(finite, r, 0))
    scale = magnitude.max(initial=0.0)
    with np.errstate(invalid="ignore", over="ignore"):
        allowed = (RELATIVE * magnitude + ABSOLUTE * min(scale, half.largest)) * 2.0**-half.significant_bits
        close = finite & (np.abs(a - r) <= allowed + half.smallest_subnormal)
        too_large = finite & (magnitude > half.largest) & (np.abs(a) >= half.largest) & (np.sign(a) == np.sign(r))
    same = (np.isnan(a) & np.isnan(r)) | (np.isinf(r) & (a == r))
    right: Array = close | too_large | same
    return right


def _is_float(array: Array) -> bool:
    return bool(np.issubdtype(array.dtype, np.floating)) or array.dtype.name == "bfloat16"
