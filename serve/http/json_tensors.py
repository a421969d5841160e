"""Tensors as JSON: numbers, booleans or strings, in a flat list or nested like the shape."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import orjson

from halfserve.protos.datatypes import Datatype
from halfserve.serve.engine.tensors import Array
from halfserve.serve.http.json_bodies import Named

# JSON has no numbers for these; they are written as in protobuf's JSON mapping, and numpy reads these strings as numbers:
# https://protobuf.dev/programming-guides/json/
SPECIAL = {"NaN", "Infinity", "-Infinity"}
PIECE = 4096  # elements that are processed at once, while no other thread runs
# The Python types of JSON values, by the family of the datatype.
KINDS: dict[str, tuple[set[type], str]] = {
    "text": ({str}, "texts"),
    "flag": ({bool, int}, "true or false"),
    "whole": ({int}, "whole numbers"),
    "fraction": ({int, float, Named, str}, "numbers"),
}


def array_from_json(data: Any, datatype: Datatype, shape: Sequence[int]) -> Array:
    """Return the array of a tensor's "data".
    Raises ValueError: an element has the wrong type or is out of range, or the elements do not fit the shape.
    """
    family = _family(datatype)
    values, sizes = _flattened(data)
    _check_kinds(values, family, datatype)
    expected = math.prod(shape)
    if len(values) != expected:
        raise ValueError(f"has {len(values)} elements in data, expected {expected} for shape {list(shape)}")
    if len(sizes) > 1 and sizes != list(shape):
        raise ValueError(f"has data nested as {sizes}, expected {list(shape)}, or a flat list")
    return _CONVERTED[family](values, datatype).reshape(tuple(shape))


def json_pieces(array: Array, datatype: Datatype) -> list[bytes]:
    """Return the elements as a flat JSON list, to be joined. Raises ValueError: an element of BYTES is not UTF-8 text."""
    flat = array.ravel()
    pieces: list[bytes] = []
    for at in range(0, flat.size, PIECE):
        values = array_to_json(flat[at : at + PIECE], datatype)
        # Texts in ASCII, which orjson does not write.
        written = json.dumps(values, separators=(",", ":")).encode() if datatype.itemsize is None else orjson.dumps(values)
        pieces += (b"," if at else b"[", written[1:-1])
    return [*pieces, b"]"] if pieces else [b"[]"]


def array_to_json(array: Array, datatype: Datatype) -> list[Any]:
    """Return the elements as a flat list of JSON's own types; NaN and infinities become strings.
    Raises ValueError: an element of BYTES is not UTF-8 text.
    """
    flat = array.ravel()
    if datatype.itemsize is None:
        try:
            return [element.decode() if isinstance(element, bytes) else str(element) for element in flat]
        except UnicodeDecodeError:
            raise ValueError('holds bytes that are not UTF-8 text; ask for it with "binary_data": true') from None
    if _family(datatype) != "fraction":
        return flat.tolist()
    if datatype.numpy is None:  # bit patterns
        flat = flat.view(datatype.array_dtype)
    with np.errstate(invalid="ignore"):  # signalling NaNs warn
        wide = flat.astype(np.float64)
    finite = np.isfinite(wide)
    values: list[Any] = wide.tolist()
    if not finite.all():
        for index in np.flatnonzero(~finite):
            values[index] = _special(values[index])
    return values


def _family(datatype: Datatype) -> str:
    if datatype.itemsize is None:
        return "text"
    if datatype.wire == "BOOL":
        return "flag"
    return "fraction" if datatype.wire.startswith(("FP", "BF")) else "whole"


def _special(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _flattened(data: Any) -> tuple[list[Any], list[int]]:
    """Return the elements of nested lists, and the lengths of their levels."""
    if not isinstance(data, list):
        return [data], []
    values, sizes = data, [len(data)]
    while values and type(values[0]) is list:
        if set(map(type, values)) != {list} or len(set(map(len, values))) > 1:
            raise ValueError("has lists of different lengths in data, expected a full array")
        sizes.append(len(values[0]))
        values = list(chain.from_iterable(values))
    return values, sizes


def _check_kinds(values: list[Any], family: str, datatype: Datatype) -> None:
    # numpy would accept null as NaN, true as 1, and a string as the number in it.
    allowed, expected = KINDS[family]
    found = _kinds(values)
    if found <= allowed:
        return
    if list in found:
        raise ValueError("has lists of different lengths in data, expected a full array")
    wrong = next(value for value in values if type(value) not in allowed)
    raise ValueError(f"has the element {_shown(wrong)} in data, expected {expected} for {datatype.wire}")


def _texts(values: list[Any], _: Datatype) -> Array:
    array = np.empty(len(values), object)
    try:
        array[:] = [value.encode() for value in values]
    except UnicodeEncodeError:
        raise ValueError("has half of a surrogate pair in data, expected whole characters") from None
    return array


def _flags(values: list[Any], datatype: Datatype) -> Array:
    for value in set().union(*_pieces(values)):
        if value not in {0, 1}:
            raise ValueError(f"has the element {_shown(value)} in data, expected true or false for {datatype.wire}")
    return _array(values, datatype.numpy)


def _wholes(values: list[Any], datatype: Datatype) -> Array:
    limits = np.iinfo(datatype.array_dtype)
    for extreme in (extreme for piece in _pieces(values) for extreme in (min(piece), max(piece))):
        if not limits.min <= extreme <= limits.max:
            raise ValueError(f"has the element {_shown(extreme)} in data, outside the range of {datatype.wire}")
    return _array(values, datatype.numpy)


def _fractions(values: list[Any], datatype: Datatype) -> Array:
    texts = {value for value in values if type(value) is str} if str in _kinds(values) else set()
    for text in texts - SPECIAL:
        raise ValueError(f"has the element {_shown(text)} in data, expected numbers for {datatype.wire}")
    try:
        wide = _array(values, np.float64)
    except OverflowError:
        raise ValueError(f"has an element in data outside the range of {datatype.wire}") from None
    infinite = np.isinf(wide)
    if any(type(values[index]) is float for index in np.flatnonzero(infinite)):  # 1e400, say
        raise ValueError(f"has an element in data outside the range of {datatype.wire}")
    with np.errstate(over="ignore"):
        narrow = wide.astype(datatype.array_dtype)
    lost = np.isinf(narrow.astype(np.float64)) & ~infinite
    if lost.any():
        raise ValueError(f"has the element {wide[lost][0]:g} in data, outside the range of {datatype.wire}")
    return narrow


def _pieces(values: list[Any]) -> Iterator[list[Any]]:
    return (values[at : at + PIECE] for at in range(0, len(values), PIECE))


def _kinds(values: list[Any]) -> set[type]:
    return set().union(*(map(type, piece) for piece in _pieces(values)))


def _array(values: list[Any], dtype: Any) -> Array:
    array = np.empty(len(values), dtype)
    for at, piece in zip(range(0, len(values), PIECE), _pieces(values), strict=True):
        array[at : at + PIECE] = piece
    return array


def _shown(value: Any) -> str:
    return f"{value!r:.40}"


_CONVERTED = {"text": _texts, "flag": _flags, "whole": _wholes, "fraction": _fractions}
