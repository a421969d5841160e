"""JSON with large tensors in it, read piece by piece: while one piece is read, nothing else in this process runs."""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

# A flat list of numbers that is the field "data" of an object, if a brace or a comma is before it. In a JSON text, a quotation
# mark after a brace, a comma or white space is either the beginning of a text or its end; it is no end here, as letters cannot
# follow one. A pattern that begins with a fixed text is looked for in a tenth of the time.
NUMBERS = re.compile(r'("data"\s*:\s*)\[([-+0-9.eE,\s]*)\]')
INDENT = 1024  # characters of white space that may be between the two
LONG = 64 * 1024  # characters
# Values besides such lists, which are read in one go: each takes 0.1 us and some hundred bytes, however short it is.
MAX_VALUES = 1_000_000


class Named(float):
    """NaN or an infinity that a document names as such. A plain float that is infinite was a number too large for one."""

    __slots__ = ()


class TooManyValuesError(ValueError):
    """A document has more than can be read in one go without keeping everybody waiting."""


def loads(text: str, *, long: int = LONG) -> Any:
    """As json.loads, which takes 10 ms a megabyte in one go; NaN and infinities are `Named`.

    Args:
        text: of a JSON document.
        long: characters from which on a list is read in pieces of this size.

    Raises:
        TooManyValuesError: it has more than MAX_VALUES besides lists of numbers that are the field "data" of an object.
        ValueError: it is none (places in the error's text do not count such lists).
        RecursionError: it is nested too deeply.
    """
    if len(text) < long:
        return json.loads(text, parse_constant=Named)
    lists: list[list[Any]] = []
    mark = secrets.token_hex(16)  # no document can have it already

    def take(match: re.Match[str]) -> str:
        if len(match[2]) < long or not text[max(0, match.start() - INDENT) : match.start()].rstrip().endswith(("{", ",")):
            return match[0]
        lists.append(_numbers(match[2], long))
        return f'{match[1]}{{"{mark}":{len(lists) - 1}}}'

    def put_back(content: dict[str, Any]) -> Any:
        return lists[content[mark]] if mark in content else content

    rest = NUMBERS.sub(take, text)
    if sum(map(rest.count, ",[{")) > MAX_VALUES:  # each value but the first comes after one of these
        raise TooManyValuesError
    return json.loads(rest, object_hook=put_back, parse_constant=Named)


def _numbers(text: str, piece: int) -> list[Any]:
    """The numbers between the brackets of a list."""
    if not text.strip(" \t\r\n"):
        return []
    numbers: list[Any] = []
    at = 0
    while at <= len(text):
        end = text.find(",", at + piece)
        end = len(text) if end < 0 else end
        part = json.loads(f"[{text[at:end]}]")
        if not part:
            raise json.JSONDecodeError("Expecting value", text, at)
        numbers += part
        at = end + 1
    return numbers
