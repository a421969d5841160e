"""Conversion of Python values to numpy arrays of a model's datatype; no value changes silently."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from halfserve.protos.datatypes import BY_WIRE, Datatype
from halfserve.serve.client.errors import ClientError, InvalidRequest
from halfserve.serve.protocol.raw_tensors import to_raw

Array = np.ndarray[Any, Any]


def as_numpy(value: Any) -> Array:
    """Return a numpy array of the same elements, without importing the value's library and without a copy where memory can be
    shared.

    A tensor of torch is detached and copied to the CPU if it is elsewhere; bfloat16, which torch cannot convert to numpy,
    becomes `ml_dtypes.bfloat16`. Other objects are converted by their `__array__` or `__dlpack__`.

    Raises:
        ValueError, TypeError, RuntimeError or BufferError: it cannot be read as an array, or has masked values.
    """
    if isinstance(value, np.ma.MaskedArray) and (masked := np.count_nonzero(value.mask)):
        # numpy would expose the values under the mask.
        raise ValueError(f"{masked} of its values are masked; fill them, with .filled(VALUE)")
    torch = sys.modules.get("torch")  # imported already if the value is a tensor
    if torch is not None and isinstance(value, torch.Tensor):
        return _of_torch(torch, value)
    if hasattr(value, "__dlpack__") and not hasattr(value, "__array__"):
        return np.from_dlpack(value)
    return np.asarray(value)


def _of_torch(torch: Any, tensor: Any) -> Array:
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    if tensor.dtype != torch.bfloat16:
        return np.asarray(tensor)
    import ml_dtypes  # noqa: PLC0415  (only bfloat16 tensors need it)

    return np.asarray(tensor.view(torch.int16)).view(ml_dtypes.bfloat16)


def fits(given: Sequence[int], expected: Sequence[int]) -> bool:
    """Return whether a shape is the expected one, in which -1 stands for any size."""
    return len(given) == len(expected) and all(e in (-1, g) for g, e in zip(given, expected, strict=True))


def check_shape(given: Sequence[int], expected: Sequence[int], where: str) -> None:
    """Refuse a shape that the model does not take.
    Raises InvalidRequest: the text gives both shapes, and says so if only the batch dimension is missing.
    """
    if fits(given, expected):
        return
    missing = len(expected) > 0 and expected[0] == -1 and fits(given, expected[1:])
    advice = "; only the batch dimension is missing: give array[None]" if missing else ""
    raise InvalidRequest(f"{where} has the shape {list(given)}, expected {list(expected)} (-1: any size){advice}")


def datatype_named(wire: str) -> Datatype:
    """Return the datatype of this name in the protocol. Raises ClientError: this client does not know the datatype."""
    if wire not in BY_WIRE:
        known = ", ".join(BY_WIRE)
        raise ClientError(f"the server named the datatype {wire!r}, expected one of {known}", code="INTERNAL")
    return BY_WIRE[wire]


def as_input(value: Any, datatype: Datatype, where: str) -> Array:
    """Return the array to send for one input; for BF16 uint16 bit patterns, for BYTES an object array of `bytes` and `str`.

    An array must have the model's dtype or one that casts to it without loss (uint8 to FP16, float16 to FP32): the caller
    decides which precision to lose. Lists and plain numbers have no dtype of their own and are converted, if they fit. `where`
    begins an error's text, such as "input 'x' of model 'mlp'".

    Raises InvalidRequest: the dtype differs and the cast could lose information, or a value does not fit.
    """
    if isinstance(value, list | tuple | bool | int | float | str | bytes):
        return converted(value, datatype, where)
    array = _as_array(value, where)
    if datatype.wire == "BYTES":
        if array.dtype.kind not in "OUST":
            raise InvalidRequest(_other_dtype(array.dtype, datatype, where))
        return _strings(array, where)
    if array.dtype == object:
        raise InvalidRequest(f"{where} takes {datatype.wire}, expected an array or list of numbers, not {type(value).__name__}")
    if datatype.wire == "BF16":
        if array.dtype.name == "bfloat16" or array.dtype == np.dtype("<u2"):
            return array.view(np.uint16)
    elif datatype.numpy is not None and (array.dtype == datatype.numpy or _casts_without_loss(array.dtype, datatype.numpy)):
        return array.astype(datatype.numpy, copy=False)
    raise InvalidRequest(_other_dtype(array.dtype, datatype, where))


def converted(value: Any, datatype: Datatype, where: str) -> Array:
    """Convert as `as_input` does, but round fractions to the nearest representable value without leaving the datatype's range.

    Raises InvalidRequest: the value is ragged or not numeric, a finite number is out of the datatype's range, or a fraction is
    given for an integer datatype. The text gives the first such value and its position.
    """
    if datatype.wire == "BYTES":
        return _strings(value, where)
    source = _as_array(value, where)
    if source.dtype.name == "bfloat16":
        source = source.astype(np.float32)
    if source.dtype.kind not in "biuf":
        raise InvalidRequest(f"{where} takes {datatype.wire}, expected numbers that fit it, not {source.dtype} elements")
    with np.errstate(over="ignore", invalid="ignore"):
        if datatype.wire == "BF16":
            target = _bfloat16_bits(source.astype(np.float32))
            as_float = (target.astype(np.uint32) << 16).view(np.float32)
            wrong = np.isfinite(source) & ~np.isfinite(as_float)
        else:
            target = source.astype(datatype.numpy)
            wrong = np.isfinite(source) & ~np.isfinite(target) if target.dtype.kind == "f" else _unequal(source, target)
    if wrong.any():
        place = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise InvalidRequest(
            f"{where}: {int(wrong.sum())} of {source.size} values do not fit {datatype.wire}{_range(datatype)};"
            f" the first is {source[place]} at {list(place)}"
        )
    return target


def to_wire(array: Array, datatype: Datatype) -> bytes:
    return to_raw(array, datatype) if datatype.wire == "BYTES" else array.tobytes()


def as_bfloat16(bits: Array) -> Array:
    """View the bit patterns as `ml_dtypes.bfloat16`."""
    import ml_dtypes  # noqa: PLC0415  (only models with BF16 need it)

    return bits.view(ml_dtypes.bfloat16)


def _as_array(value: Any, where: str) -> Array:
    try:
        array = as_numpy(value)
        if array.dtype == np.float64 and not isinstance(value, np.ndarray):
            # Integers on both sides of 2**63 have no common integer dtype: numpy rounds them to float64.
            exact = np.array(value, dtype=object)
            if all(isinstance(number, int) and 0 <= number < 2**64 for number in exact.flat):
                return exact.astype(np.uint64)
        return array
    except (ValueError, TypeError, RuntimeError, BufferError) as error:
        reason = "its rows differ in length" if "inhomogeneous" in str(error) else str(error)
        raise InvalidRequest(f"{where} cannot be read as an array: {reason}") from None


def _casts_without_loss(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    # numpy counts int64 -> float64 among the safe casts, although it rounds above 2**53.
    rounds = source.kind in "iu" and source.itemsize == 8 and target.kind == "f"
    return np.can_cast(source, target, "safe") and not rounds


def _other_dtype(given: np.dtype[Any], datatype: Datatype, where: str) -> str:
    if datatype.wire == "BF16":
        return (
            f"{where} takes BF16: give an array of ml_dtypes.bfloat16 or of uint16 bit patterns, not {given}; or pass cast=True"
        )
    if datatype.numpy is None or datatype.wire == "BYTES":
        return f"{where} takes {datatype.wire} (an array of bytes or str), but the array is {given}"
    name = datatype.numpy.name
    beyond = f"; numbers beyond {np.finfo(datatype.numpy).max:g} become inf" if datatype.numpy.kind == "f" else ""
    return f"{where} takes {datatype.wire}, but the array is {given}; convert it with .astype(np.{name}) or cast=True{beyond}"


def _strings(value: Any, where: str) -> Array:
    array = value if isinstance(value, list | tuple | str | bytes) else _as_array(value, where)
    try:
        array = np.array(array, dtype=object)
    except ValueError:
        raise InvalidRequest(f"{where} cannot be read as an array: its rows differ in length") from None
    for element in array.ravel():
        if not _can_be_sent(element):
            if isinstance(element, list | tuple):
                raise InvalidRequest(f"{where} cannot be read as an array: its rows differ in length")
            expected = "text that UTF-8 can encode" if isinstance(element, str) else "strings or bytes"
            raise InvalidRequest(f"{where} takes BYTES, expected {expected}, not {type(element).__name__} {element!r:.40}")
    return array


def _can_be_sent(element: object) -> bool:
    """Return whether it is bytes, or a str without unpaired surrogates. None, a missing value, is neither."""
    if not isinstance(element, str):
        return isinstance(element, bytes)
    try:
        return element.isascii() or bool(element.encode())
    except UnicodeEncodeError:
        return False


def _unequal(source: Array, target: Array) -> Array:
    """Mask of the values that a conversion to integers or booleans has changed."""
    if source.dtype.kind != "f":
        return np.asarray(source != target)
    if target.dtype.kind == "b":
        return np.asarray((source != 0) & (source != 1))
    # Not `source != target`: numpy would compare in float64, which cannot tell 2**63 - 1 from 2**63.
    info = np.iinfo(target.dtype)
    inside = (source >= float(info.min)) & (source < float(2 ** (info.bits - (info.kind == "i"))))
    return np.asarray(~(inside & (source == np.trunc(source))))


def _range(datatype: Datatype) -> str:
    if datatype.wire == "BF16":
        return " (largest 3.39e+38)"
    if datatype.numpy is None or datatype.numpy.kind == "b":
        return " (true or false)"
    if datatype.numpy.kind == "f":
        return f" (largest {np.finfo(datatype.numpy).max:g})"
    info = np.iinfo(datatype.numpy)
    return f" (whole numbers from {info.min} to {info.max})"


def _bfloat16_bits(values: Array) -> Array:
    """Return the upper halves of float32 patterns, rounded to nearest, ties to even; a NaN stays a NaN."""
    bits = values.view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


@dataclass(frozen=True)
class Class:
    """One of the best classes of a row, as returned for a request with `top_k=`.

    Attributes:
        index: index of the class.
        value: value of the output for the class.
        label: name of the class; empty if the model has no labels.
    """

    index: int
    value: float
    label: str


def classes_of(output: Array) -> list[list[Class]]:
    """Return the classes of each row, best first.

    Args:
        output: output requested with `top_k`: an object array [rows, k] or [k] of b"value:index[:label]".

    Raises:
        ClientError: an element has another form, for example because the output was requested without `top_k`.
    """
    rows = output.reshape(-1, output.shape[-1]) if output.ndim and output.size else output.reshape(0, 0)
    return [[_class(element) for element in row] for row in rows]


def _class(element: object) -> Class:
    text = element.decode("utf-8", "replace") if isinstance(element, bytes) else str(element)
    value, _, rest = text.partition(":")
    index, _, label = rest.partition(":")
    try:
        return Class(int(index), float(value), label)
    except ValueError:
        raise ClientError(
            f"{text[:40]!r} is no class, expected VALUE:INDEX[:LABEL]; was the output asked for with top_k?", code="INTERNAL"
        ) from None
