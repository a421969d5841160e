"""Bodies of the text endpoints: bounded JSON, and its fields by type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NotRequired, TypedDict

import numpy as np
import orjson
from numpy.typing import NDArray

from halfserve.serve.engine.errors import InvalidArgumentError
from halfserve.serve.http.routing.error_forms import Fault, InputError

# orjson holds the interpreter lock, and an empty list takes it 50 ns: these are read in a few milliseconds.
MAX_BRACKETS = 32_768
MAX_COMMAS = 262_144
MAX_QUOTES = 65_536  # besides escaped ones
VALUE_BYTES = 64  # memory for each of these characters
CONTAINER_BYTES = 128  # more, for a list or an object
LOCKED_BYTES = 65_536  # largest body whose values are counted under the interpreter lock; numpy releases it, which takes longer
PARSER_TIMES = 12  # times the body's bytes: what orjson takes while it parses
MAX_INPUTS = 2048  # texts in one request, as OpenAI's
MAX_ECHO = 40  # characters of a client's own value in an error's text
Content = Mapping[str, Any]
Text = str | tuple[str, str]


class TeiTruncationJson(TypedDict):
    """The fields that `truncates` reads."""

    truncate: NotRequired[bool | None]
    truncation_direction: NotRequired[str | None]


def memory_of_values(body: bytes) -> int:
    """Bytes of memory that a body's JSON values take, at most.

    Raises:
        InvalidArgumentError: there are more values than can be read without holding other requests up.
    """
    if len(body) <= LOCKED_BYTES:
        count, highest = body.count, 0 if body.isascii() else 0xFF
    else:
        codes = np.frombuffer(body, np.uint8)
        count, highest = partial(_count, codes), int(codes.max())
    brackets, commas = count(b"[") + count(b"{"), count(b",")
    quotes = count(b'"') - count(b'\\"')
    if brackets > MAX_BRACKETS or commas > MAX_COMMAS or quotes > MAX_QUOTES:
        raise InvalidArgumentError(
            f"the body has more than {MAX_BRACKETS} brackets, {MAX_COMMAS} commas or {MAX_QUOTES} quotation marks; split it"
        )
    # A text takes 1, 2 or 4 bytes for each character; in UTF-8, one that takes 4 begins with 0xf0 or more.
    width = 4 if highest >= 0xF0 or count(b"\\u") else 1 if highest < 0x80 else 2
    return width * len(body) + VALUE_BYTES * (brackets + commas + quotes) + CONTAINER_BYTES * brackets


def read_content(body: bytes) -> Content:
    """Parse a body as a JSON object.

    Raises:
        InvalidArgumentError: it is not one.
    """
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidArgumentError(f"the body is not JSON in UTF-8: {error.msg}; expected an object") from None
    if not isinstance(content, dict):
        raise InvalidArgumentError(f"the body is {shown(content)}, expected a JSON object")
    return content


def _count(codes: NDArray[np.uint8], characters: bytes) -> int:
    """Return how often one or two characters occur."""
    found = codes[: len(codes) - len(characters) + 1] == characters[0]
    if len(characters) > 1:
        found &= codes[1:] == characters[1]
    return int(np.count_nonzero(found))


def shown(value: Any) -> str:
    """Return a short form of a client's value."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return f"an object of {len(value)}"
    text = orjson.dumps(value[: MAX_ECHO + 1] if isinstance(value, str) else value).decode()
    return f"{text[:MAX_ECHO]}..." if len(text) > MAX_ECHO else text


def text_field(content: Content, name: str) -> str:
    """Return a text that must be there, and not empty.

    Raises:
        InputError: it is not.
    """
    value = content.get(name)
    if not isinstance(value, str):
        raise InputError(f"{name!r} is {shown(value)}, expected a text", param=name)
    if not value:
        raise InputError(f"{name!r} is an empty text, expected one with characters", param=name, fault=Fault.EMPTY)
    return value


def flag_field(content: Content, name: str, *, default: bool) -> bool:
    """Return a field that is true or false; null stands for the default.

    Raises:
        InputError: it is something else.
    """
    value = content.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InputError(f"{name!r} is {shown(value)}, expected true or false", param=name)
    return value


def whole_field(content: Content, name: str) -> int | None:
    """Return a whole number of at least 1; None where it is absent or null.

    Raises:
        InputError: it is something else.
    """
    value = content.get(name)
    if value is not None and (type(value) is not int or value < 1):
        raise InputError(f"{name!r} is {shown(value)}, expected a whole number of 1 or more", param=name)
    return value


def refuse_fields(content: Content, reasons: Mapping[str, str]) -> None:
    """Refuse fields that would change the answer and are not served; null and false stand for their absence.

    Raises:
        InputError: one of them is there; `reasons` says what to do instead, by name.
    """
    for name, reason in reasons.items():
        if content.get(name):
            raise InputError(f"{name!r} is not served here; {reason}", param=name)


def require_count(inputs: Sequence[Any], name: str) -> None:
    """Check the number of a request's inputs.

    Raises:
        InputError: there is none, or more than MAX_INPUTS.
    """
    if not inputs:
        raise InputError(f"{name!r} is an empty list, expected at least one text", param=name, fault=Fault.EMPTY)
    if len(inputs) > MAX_INPUTS:
        raise InputError(
            f"{name!r} has {len(inputs)} entries, expected at most {MAX_INPUTS}; split the request",
            param=name,
            fault=Fault.TOO_MANY,
        )


def truncates(content: Content) -> bool:
    """Return whether TEI's fields ask for long texts to be cut, on the right.

    Raises:
        InputError: they are wrong, or ask for the left.
    """
    if content.get("truncation_direction") not in (None, "Right", "right"):
        raise InputError(
            f"'truncation_direction' is {shown(content['truncation_direction'])}, expected \"Right\"",
            param="truncation_direction",
        )
    return flag_field(content, "truncate", default=False)


def texts_of(value: Any, name: str) -> list[str]:
    """Return a list of texts with characters.

    Raises:
        InputError: it is not one, or there are none or too many.
    """
    if not isinstance(value, list):
        raise InputError(f"{name!r} is {shown(value)}, expected a list of texts", param=name)
    require_count(value, name)
    if set(map(type, value)) == {str} and all(value):  # in a third of the time that each entry takes by itself
        return value
    for index, entry in enumerate(value):
        if not isinstance(entry, str):
            raise InputError(f"{name}[{index}] is {shown(entry)}, expected a text", param=name)
        if not entry:
            raise InputError(f"{name}[{index}] is an empty text, expected characters", param=name, fault=Fault.EMPTY)
    return list(value)


def one_or_more(value: Any, name: str) -> list[str]:
    """Return a text, or a list of texts.

    Raises:
        InputError: it is neither; see `texts_of`.
    """
    return texts_of([value] if isinstance(value, str) else value, name)
