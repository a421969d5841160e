"""Read JSON from clients field by field: each wrong one is named, with what was expected."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

from serve.engine.errors import InvalidArgumentError
from serve.http.large_json import MAX_VALUES, TooManyValuesError, loads

BASE64_PIECE = 2**18  # characters; four of them are three bytes
MAX_ECHO = 40  # characters of a client's own value in an error's text
Fields = Mapping[str, Any]
_KINDS: dict[type, str] = {str: "text", int: "a whole number", list: "a list", dict: "an object", bool: "true or false"}


def parse_object(body: bytes | memoryview, *, empty: bool = False) -> Fields:
    """The JSON object that a body holds.

    Args:
        body: UTF-8 text.
        empty: whether no body at all stands for {}.

    Raises:
        InvalidArgumentError: it is no JSON, or no object.
    """
    if empty and not bytes(body).strip():
        return {}
    try:
        value = loads(bytes(body).decode())
    except json.JSONDecodeError as error:
        raise InvalidArgumentError(
            f"the body is no JSON: {error.msg} at line {error.lineno}, column {error.colno}; expected an object"
        ) from None
    except UnicodeDecodeError:
        raise InvalidArgumentError(
            "the body is no UTF-8 text; expected JSON, and where bytes follow it, its length in Inference-Header-Content-Length"
        ) from None
    except TooManyValuesError:
        raise InvalidArgumentError(
            f"the body's JSON has more than {MAX_VALUES} values besides flat lists of numbers; send tensors as such lists, "
            "or as bytes behind the JSON (binary_data_size)"
        ) from None
    except (RecursionError, ValueError):
        raise InvalidArgumentError("the body's JSON is nested too deeply or has too long a number; expected less") from None
    if not isinstance(value, dict):
        raise InvalidArgumentError(f"the body is {_shown(value)}, expected a JSON object")
    return value


def text(fields: Fields, name: str, where: str, default: str | None = None) -> str:
    """A field that is text."""
    return str(_field(fields, name, where, str, default))


def whole(fields: Fields, name: str, where: str, default: int | None = None) -> int:
    """A field that is a whole number of at least 0, and below 2**63."""
    number = int(_field(fields, name, where, int, default))
    if not 0 <= number < 2**63:
        raise InvalidArgumentError(f"{where} has {name} {_shown(number)}, expected 0 or more, below 2**63")
    return number


def items(fields: Fields, name: str, where: str) -> list[Any]:
    """A field that is a list; none is an empty one."""
    found: list[Any] = _field(fields, name, where, list, [])
    return found


def members(fields: Fields, name: str, where: str) -> dict[str, Any]:
    """A field that is an object; none is an empty one."""
    found: dict[str, Any] = _field(fields, name, where, dict, {})
    return found


def each_object(entries: list[Any], where: str) -> list[Fields]:
    """The entries of a list that must all be objects."""
    for entry in entries:
        if not isinstance(entry, dict):
            raise InvalidArgumentError(f"an entry of {where} is {_shown(entry)}, expected an object")
    return entries


def shape(fields: Fields, where: str) -> list[int]:
    """The field "shape": sizes of at least 0."""
    sizes: list[Any] = _field(fields, "shape", where, list, None)
    if not all(type(size) is int and 0 <= size < 2**63 for size in sizes):
        raise InvalidArgumentError(f"{where} has shape {_shown(sizes)}, expected a list of sizes, whole numbers of 0 or more")
    return sizes


def flag(fields: Fields, name: str, where: str, default: bool | None = None) -> bool | None:
    """A field that is true or false."""
    if name not in fields:
        return default
    return bool(_field(fields, name, where, bool, None))


def base64_bytes(fields: Fields, name: str, where: str) -> bytes:
    """A field that is bytes, as base64."""
    encoded = text(fields, name, where)
    try:
        if "=" in encoded[:-2]:
            raise ValueError  # noqa: TRY301  (as for all else that is none)
        # In pieces: while one is decoded, nothing else in this process runs.
        pieces = [encoded[at : at + BASE64_PIECE] for at in range(0, len(encoded), BASE64_PIECE)]
        return b"".join([base64.b64decode(piece, validate=True) for piece in pieces])
    except ValueError:
        raise InvalidArgumentError(f"{where} has {name} that is no base64; expected bytes in it") from None


def _field(fields: Fields, name: str, where: str, kind: type, default: Any) -> Any:
    value = fields.get(name)
    if value is None:
        if default is None:
            raise InvalidArgumentError(f"{where} has no {name!r}, expected {_KINDS[kind]}")
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise InvalidArgumentError(f"{where} has {name} {_shown(value)}, expected {_KINDS[kind]}")
    return value


def _shown(value: Any) -> str:
    written = ""
    for piece in json.JSONEncoder().iterencode(value):  # as it is asked for: a value may have millions within it
        written += piece
        if len(written) > MAX_ECHO:
            return f"{written[:MAX_ECHO]}..."
    return written
